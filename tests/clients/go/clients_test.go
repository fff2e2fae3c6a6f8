// Every test is true of etcd 3.7.1 too: the suite runs against both.
package clients

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
)

func endpoint(t *testing.T) string {
	t.Helper()
	endpoint := os.Getenv("ENDPOINT")
	if endpoint == "" {
		t.Fatal("ENDPOINT names the server to test")
	}
	return endpoint
}

func client(t *testing.T) *clientv3.Client {
	t.Helper()
	c, err := clientv3.New(clientv3.Config{Endpoints: []string{endpoint(t)}, DialTimeout: 10 * time.Second, Logger: zap.NewNop()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// raw shows codes as they travel; the client above rebuilds them from the text.
func raw(t *testing.T) *grpc.ClientConn {
	t.Helper()
	conn, err := grpc.NewClient(endpoint(t), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

func context10(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func must[T any](t *testing.T) func(T, error) T {
	return func(value T, err error) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return value
	}
}

func equal[T comparable](t *testing.T, what string, got, want T) {
	t.Helper()
	if got != want {
		t.Errorf("%s: got %v, want %v", what, got, want)
	}
}

func refused(t *testing.T, what string, err error, code codes.Code, text string) {
	t.Helper()
	if status.Code(err) != code || status.Convert(err).Message() != text {
		t.Errorf("%s: got %v, want %v %q", what, err, code, text)
	}
}

func keys(kvs []string) string { return strings.Join(kvs, " ") }

func keysOf(r *clientv3.GetResponse) string {
	var all []string
	for _, kv := range r.Kvs {
		all = append(all, string(kv.Key))
	}
	return keys(all)
}

func TestPutGetDelete(t *testing.T) {
	c, ctx := client(t), context10(t)
	before := must[*clientv3.GetResponse](t)(c.Get(ctx, "pgd/none")).Header.Revision
	first := must[*clientv3.PutResponse](t)(c.Put(ctx, "pgd/a", "1", clientv3.WithPrevKV()))
	equal(t, "revision", first.Header.Revision, before+1)
	equal(t, "previous of a new key", first.PrevKv == nil, true)
	second := must[*clientv3.PutResponse](t)(c.Put(ctx, "pgd/a", "", clientv3.WithPrevKV()))
	equal(t, "previous value", string(second.PrevKv.Value), "1")

	got := must[*clientv3.GetResponse](t)(c.Get(ctx, "pgd/a"))
	kv := got.Kvs[0]
	equal(t, "create", kv.CreateRevision, before+1)
	equal(t, "mod", kv.ModRevision, before+2)
	equal(t, "version", kv.Version, int64(2))
	equal(t, "value", string(kv.Value), "")
	equal(t, "member", got.Header.MemberId != 0 && got.Header.ClusterId != 0 && got.Header.RaftTerm != 0, true)

	old := must[*clientv3.GetResponse](t)(c.Get(ctx, "pgd/a", clientv3.WithRev(before+1)))
	equal(t, "old value", string(old.Kvs[0].Value), "1")
	equal(t, "the header shows the newest revision", old.Header.Revision, before+2)

	deleted := must[*clientv3.DeleteResponse](t)(c.Delete(ctx, "pgd/a", clientv3.WithPrevKV()))
	equal(t, "deleted", deleted.Deleted, int64(1))
	equal(t, "what was deleted", deleted.PrevKvs[0].Version, int64(2))
	nothing := must[*clientv3.DeleteResponse](t)(c.Delete(ctx, "pgd/a"))
	equal(t, "deleted again", nothing.Deleted, int64(0))
	equal(t, "takes no revision", nothing.Header.Revision, before+3)

	must[*clientv3.PutResponse](t)(c.Put(ctx, "pgd/a", "new"))
	again := must[*clientv3.GetResponse](t)(c.Get(ctx, "pgd/a"))
	equal(t, "version of a new life", again.Kvs[0].Version, int64(1))
}

func TestRanges(t *testing.T) {
	c, ctx := client(t), context10(t)
	for i, key := range []string{"b", "a", "d", "c", "e"} {
		must[*clientv3.PutResponse](t)(c.Put(ctx, "ranges/"+key, fmt.Sprint(9-i)))
	}
	get := func(options ...clientv3.OpOption) *clientv3.GetResponse {
		t.Helper()
		return must[*clientv3.GetResponse](t)(c.Get(ctx, "ranges/", append([]clientv3.OpOption{clientv3.WithPrefix()}, options...)...))
	}
	order := func(r *clientv3.GetResponse) string { return strings.ReplaceAll(keysOf(r), "ranges/", "") }
	equal(t, "key order", order(get()), "a b c d e")
	limited := get(clientv3.WithLimit(2))
	equal(t, "limit", order(limited), "a b")
	equal(t, "count", limited.Count, int64(5))
	equal(t, "more", limited.More, true)
	equal(t, "no more", get(clientv3.WithLimit(5)).More, false)
	equal(t, "by creation", order(get(clientv3.WithSort(clientv3.SortByCreateRevision, clientv3.SortDescend))), "e c d a b")
	equal(t, "by value", order(get(clientv3.WithSort(clientv3.SortByValue, clientv3.SortAscend), clientv3.WithLimit(2))), "e c")
	revision := get().Kvs[0].ModRevision
	filtered := get(clientv3.WithMinModRev(revision), clientv3.WithMaxModRev(revision+1))
	equal(t, "filters", order(filtered), "a d")
	equal(t, "count before filters", filtered.Count, int64(5))
	count := get(clientv3.WithCountOnly())
	equal(t, "count only", count.Count, int64(5))
	equal(t, "without keys", len(count.Kvs), 0)
	equal(t, "keys only", len(get(clientv3.WithKeysOnly()).Kvs[0].Value), 0)
	empty := must[*clientv3.GetResponse](t)(c.Get(ctx, "ranges/c", clientv3.WithRange("ranges/a")))
	equal(t, "an end before the start", empty.Count, int64(0))
	serializable := get(clientv3.WithSerializable())
	equal(t, "serializable", order(serializable), "a b c d e")
}

func TestStreamEqualsUnary(t *testing.T) {
	c, ctx := client(t), context10(t)
	for i := 0; i < 120; i++ {
		must[*clientv3.PutResponse](t)(c.Put(ctx, fmt.Sprintf("stream/%04d", i*37%120), strings.Repeat("x", i)))
	}
	kv := pb.NewKVClient(raw(t))
	for _, request := range []*pb.RangeRequest{
		{Key: []byte("stream/"), RangeEnd: []byte("stream0")},
		{Key: []byte("stream/"), RangeEnd: []byte("stream0"), Limit: 25},
		{Key: []byte("stream/"), RangeEnd: []byte("stream0"), Limit: 10, KeysOnly: true},
		{Key: []byte("stream/"), RangeEnd: []byte("stream0"), CountOnly: true},
		{Key: []byte("stream/0001")},
		{Key: []byte("streamless")},
	} {
		unary := must[*pb.RangeResponse](t)(kv.Range(ctx, request))
		stream := must[pb.KV_RangeStreamClient](t)(kv.RangeStream(ctx, request))
		var last *pb.RangeResponse
		var got []string
		for {
			message, err := stream.Recv()
			if err != nil {
				equal(t, "end", err.Error(), "EOF")
				break
			}
			if last != nil {
				equal(t, "only the last message has a header", last.Header == nil && !last.More && last.Count == 0, true)
			}
			last = message.RangeResponse
			for _, kv := range last.Kvs {
				got = append(got, string(kv.Key)+"="+string(kv.Value))
			}
		}
		var want []string
		for _, kv := range unary.Kvs {
			want = append(want, string(kv.Key)+"="+string(kv.Value))
		}
		equal(t, fmt.Sprint("keys of ", request), keys(got), keys(want))
		equal(t, "count", last.Count, unary.Count)
		equal(t, "more", last.More, unary.More)
		equal(t, "revision", last.Header.GetRevision(), unary.Header.Revision)
	}
	for _, refusal := range []struct {
		request *pb.RangeRequest
		code    codes.Code
		text    string
	}{
		{&pb.RangeRequest{Key: []byte("a"), SortOrder: pb.RangeRequest_DESCEND}, codes.Unimplemented, "RangeStream does not support custom sort orders"},
		{&pb.RangeRequest{Key: []byte("a"), MinModRevision: 1}, codes.Unimplemented, "RangeStream does not support revision filters"},
		{&pb.RangeRequest{}, codes.InvalidArgument, "etcdserver: key is not provided"},
		{&pb.RangeRequest{Key: []byte("a"), Revision: 1 << 40}, codes.OutOfRange, "etcdserver: mvcc: required revision is a future revision"},
	} {
		stream := must[pb.KV_RangeStreamClient](t)(kv.RangeStream(ctx, refusal.request))
		_, err := stream.Recv()
		refused(t, refusal.text, err, refusal.code, refusal.text)
	}
}

func TestTransactions(t *testing.T) {
	c, ctx := client(t), context10(t)
	must[*clientv3.PutResponse](t)(c.Put(ctx, "txn-deleted", "1"))
	before := must[*clientv3.PutResponse](t)(c.Put(ctx, "txn/a", "1")).Header.Revision
	r := must[*clientv3.TxnResponse](t)(c.Txn(ctx).
		If(clientv3.Compare(clientv3.Value("txn/a"), "=", "1"), clientv3.Compare(clientv3.Version("txn/none"), "=", 0)).
		Then(clientv3.OpPut("txn/a", "2"), clientv3.OpPut("txn/b", "2"), clientv3.OpGet("txn/", clientv3.WithPrefix()), clientv3.OpDelete("txn-deleted")).
		Else(clientv3.OpGet("txn/a")).Commit())
	equal(t, "succeeded", r.Succeeded, true)
	equal(t, "one revision", r.Header.Revision, before+1)
	ranged := r.Responses[2].GetResponseRange()
	equal(t, "a range sees what was put before it", len(ranged.Kvs), 2)
	equal(t, "both at one revision", ranged.Kvs[0].ModRevision == ranged.Kvs[1].ModRevision, true)
	equal(t, "an inner header has the revision alone", ranged.Header.Revision == before+1 && ranged.Header.MemberId == 0, true)
	equal(t, "deleted", r.Responses[3].GetResponseDeleteRange().Deleted, int64(1))

	// etcd: semantics 5.6 and 5.9.
	r = must[*clientv3.TxnResponse](t)(c.Txn(ctx).If(clientv3.Compare(clientv3.Value("txn/none"), "!=", "x")).Commit())
	equal(t, "no value is not another value", r.Succeeded, false)
	r = must[*clientv3.TxnResponse](t)(c.Txn(ctx).Then(
		clientv3.OpPut("txn/n", "1"),
		clientv3.OpTxn([]clientv3.Cmp{clientv3.Compare(clientv3.Value("txn/n"), "=", "1")}, nil, nil)).Commit())
	equal(t, "an inner compare looks at the time before", r.Responses[1].GetResponseTxn().Succeeded, false)

	_, err := c.Txn(ctx).Then(clientv3.OpPut("txn/d", "1"), clientv3.OpPut("txn/d", "2")).Commit()
	equal(t, "a key twice", errors.Is(err, rpctypes.ErrDuplicateKey), true)
	_, err = c.Txn(ctx).Then(clientv3.OpPut("txn/d", "1"), clientv3.OpGet("txn/a", clientv3.WithRev(1<<40))).Commit()
	equal(t, "an operation that fails", errors.Is(err, rpctypes.ErrFutureRev), true)
	equal(t, "leaves nothing", must[*clientv3.GetResponse](t)(c.Get(ctx, "txn/d")).Count, int64(0))
	var many []clientv3.Op
	for i := 0; i < 129; i++ {
		many = append(many, clientv3.OpPut(fmt.Sprint("txn/many/", i), ""))
	}
	_, err = c.Txn(ctx).Then(many...).Commit()
	equal(t, "129 operations", errors.Is(err, rpctypes.ErrTooManyOps), true)
	must[*clientv3.TxnResponse](t)(c.Txn(ctx).Then(many[:128]...).Commit())

	guarded := func(revision int64) bool {
		return must[*clientv3.TxnResponse](t)(c.Txn(ctx).
			If(clientv3.Compare(clientv3.ModRevision("txn/g"), "=", revision)).
			Then(clientv3.OpPut("txn/g", "x")).Else(clientv3.OpGet("txn/g")).Commit()).Succeeded
	}
	equal(t, "the guarded update of Kubernetes, on nothing", guarded(0), true)
	equal(t, "and with a guard that is too old", guarded(0), false)
}

// Codes and texts as they travel (etcd: errors.md).
func TestErrors(t *testing.T) {
	c, ctx := client(t), context10(t)
	must[*clientv3.PutResponse](t)(c.Put(ctx, "errors/a", "1"))
	kv := pb.NewKVClient(raw(t))
	put := func(r *pb.PutRequest) error { _, err := kv.Put(ctx, r); return err }
	get := func(r *pb.RangeRequest) error { _, err := kv.Range(ctx, r); return err }
	none := "etcdserver: key is not provided"
	refused(t, "put", put(&pb.PutRequest{}), codes.InvalidArgument, none)
	refused(t, "range", get(&pb.RangeRequest{}), codes.InvalidArgument, none)
	_, err := kv.DeleteRange(ctx, &pb.DeleteRangeRequest{})
	refused(t, "delete", err, codes.InvalidArgument, none)
	_, err = kv.Txn(ctx, &pb.TxnRequest{Compare: []*pb.Compare{{}}})
	refused(t, "compare", err, codes.InvalidArgument, none)
	_, err = kv.Txn(ctx, &pb.TxnRequest{Failure: []*pb.RequestOp{{}}})
	refused(t, "empty operation", err, codes.InvalidArgument, "etcdserver: key not found")
	refused(t, "sort", get(&pb.RangeRequest{Key: []byte("a"), SortOrder: 9}), codes.InvalidArgument, "etcdserver: invalid sort option")
	refused(t, "ignored value", put(&pb.PutRequest{Key: []byte("a"), Value: []byte("1"), IgnoreValue: true}), codes.InvalidArgument, "etcdserver: value is provided")
	refused(t, "ignored lease", put(&pb.PutRequest{Key: []byte("a"), Lease: 1, IgnoreLease: true}), codes.InvalidArgument, "etcdserver: lease is provided")
	refused(t, "ignored value of nothing", put(&pb.PutRequest{Key: []byte("errors/none"), IgnoreValue: true}), codes.InvalidArgument, "etcdserver: key not found")
	refused(t, "lease", put(&pb.PutRequest{Key: []byte("a"), Lease: 77}), codes.NotFound, "etcdserver: requested lease not found")
	refused(t, "future", get(&pb.RangeRequest{Key: []byte("a"), Revision: 1 << 40}), codes.OutOfRange, "etcdserver: mvcc: required revision is a future revision")

	large := func(bytes int) error {
		_, err := kv.Put(ctx, &pb.PutRequest{Key: []byte("large"), Value: make([]byte, bytes)}, grpc.MaxCallSendMsgSize(8<<20))
		return err
	}
	equal(t, "just short enough", large(1572864-64), nil)
	refused(t, "a little too long", large(1572864), codes.InvalidArgument, "etcdserver: request is too large")
	bytes := 3 << 20
	message := len("large") + 2 + bytes + 5
	refused(t, "much too long", large(bytes), codes.ResourceExhausted, fmt.Sprintf("grpc: received message larger than max (%d vs. 2097152)", message))
}

func TestCompaction(t *testing.T) {
	c, ctx := client(t), context10(t)
	first := must[*clientv3.PutResponse](t)(c.Put(ctx, "compaction/a", "1")).Header.Revision
	last := must[*clientv3.PutResponse](t)(c.Put(ctx, "compaction/a", "2")).Header.Revision
	must[*clientv3.CompactResponse](t)(c.Compact(ctx, last, clientv3.WithCompactPhysical()))
	_, err := c.Get(ctx, "compaction/a", clientv3.WithRev(first))
	equal(t, "below", errors.Is(err, rpctypes.ErrCompacted), true)
	at := must[*clientv3.GetResponse](t)(c.Get(ctx, "compaction/a", clientv3.WithRev(last)))
	equal(t, "at", string(at.Kvs[0].Value), "2")
	_, err = c.Compact(ctx, last)
	equal(t, "twice", errors.Is(err, rpctypes.ErrCompacted), true)
	_, err = c.Compact(ctx, last+100)
	equal(t, "beyond", errors.Is(err, rpctypes.ErrFutureRev), true)
}

func TestMaintenanceAndCluster(t *testing.T) {
	c, ctx := client(t), context10(t)
	s := must[*clientv3.StatusResponse](t)(c.Status(ctx, endpoint(t)))
	equal(t, "version", s.Version, "3.7.1")
	equal(t, "sizes", s.DbSize > 0 && s.DbSizeInUse > 0 && s.DbSizeInUse <= s.DbSize, true)
	equal(t, "quota", s.DbSizeQuota, int64(2<<30))
	equal(t, "leader", s.Leader, s.Header.MemberId)
	equal(t, "indexes", s.RaftIndex > 0 && s.RaftAppliedIndex > 0 && s.RaftTerm > 0, true)
	equal(t, "errors", len(s.Errors), 0)

	revision := must[*clientv3.PutResponse](t)(c.Put(ctx, "maintenance/a", "1")).Header.Revision
	one := must[*clientv3.HashKVResponse](t)(c.HashKV(ctx, endpoint(t), 0))
	equal(t, "hashed at", one.HashRevision, revision)
	must[*clientv3.PutResponse](t)(c.Put(ctx, "maintenance/a", "2"))
	two := must[*clientv3.HashKVResponse](t)(c.HashKV(ctx, endpoint(t), revision))
	equal(t, "the hash of a revision stays", two.Hash, one.Hash)
	_, err := c.HashKV(ctx, endpoint(t), 1<<40)
	equal(t, "the future has no hash", errors.Is(err, rpctypes.ErrFutureRev), true)
	must[*clientv3.DefragmentResponse](t)(c.Defragment(ctx, endpoint(t)))

	members := must[*clientv3.MemberListResponse](t)(c.MemberList(ctx))
	equal(t, "members", len(members.Members), 1)
	equal(t, "member", members.Members[0].ID, s.Header.MemberId)
	equal(t, "client URL", members.Members[0].ClientURLs[0], "http://"+endpoint(t))
	equal(t, "no revision in this header", members.Header.Revision, int64(0))
}

func TestHealth(t *testing.T) {
	health, ctx := grpc_health_v1.NewHealthClient(raw(t)), context10(t)
	r := must[*grpc_health_v1.HealthCheckResponse](t)(health.Check(ctx, &grpc_health_v1.HealthCheckRequest{}))
	equal(t, "health", r.Status, grpc_health_v1.HealthCheckResponse_SERVING)
	_, err := health.Check(ctx, &grpc_health_v1.HealthCheckRequest{Service: "etcdserverpb.KV"})
	refused(t, "another name", err, codes.NotFound, "unknown service")
	watch := must[grpc_health_v1.Health_WatchClient](t)(health.Watch(ctx, &grpc_health_v1.HealthCheckRequest{}))
	r = must[*grpc_health_v1.HealthCheckResponse](t)(watch.Recv())
	equal(t, "watched", r.Status, grpc_health_v1.HealthCheckResponse_SERVING)
	list := must[*grpc_health_v1.HealthListResponse](t)(health.List(ctx, &grpc_health_v1.HealthListRequest{}))
	equal(t, "listed", list.Statuses[""].GetStatus(), grpc_health_v1.HealthCheckResponse_SERVING)
}

// Bytes that the message type does not understand, and methods that nobody has.
type bytesCodec struct{}

func (bytesCodec) Marshal(v any) ([]byte, error)      { return v.([]byte), nil }
func (bytesCodec) Unmarshal(data []byte, v any) error { *v.(*[]byte) = data; return nil }
func (bytesCodec) Name() string                       { return "proto" }

func TestTransport(t *testing.T) {
	conn, ctx := raw(t), context10(t)
	invoke := func(ctx context.Context, method string, body []byte) error {
		var answer []byte
		return conn.Invoke(ctx, method, body, &answer, grpc.ForceCodec(bytesCodec{}))
	}
	refused(t, "service", invoke(ctx, "/nobody.Nothing/Do", nil), codes.Unimplemented, "unknown service nobody.Nothing")
	refused(t, "method", invoke(ctx, "/etcdserverpb.KV/Do", nil), codes.Unimplemented, "unknown method Do for service etcdserverpb.KV")
	err := invoke(ctx, "/etcdserverpb.KV/Put", []byte{0xff, 0xff, 0xff})
	equal(t, "malformed", status.Code(err), codes.Internal)
	equal(t, "in words", strings.HasPrefix(status.Convert(err).Message(), "grpc: error unmarshalling request: "), true)
	equal(t, "unknown fields are no harm", invoke(ctx, "/etcdserverpb.KV/Range", []byte{0x0a, 1, 'a', 0xf8, 0x7f, 1}), nil)
}
