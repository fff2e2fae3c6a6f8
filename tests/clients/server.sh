# Sourced by the suites: starts a server of its own for each of them, with a new data directory and a free port.
#
#   with_server BINARY COMMAND...   runs the command while the server runs; it finds the server in $ENDPOINT
#   each_server COMMAND...          the same with $ETCORE, and with a real etcd where $ETCD names one: what a
#                                   suite asks of etcore it asks of etcd too, so that it cannot be its own measure
#
# With $ENDPOINT already set, the command runs against that server, which must be fresh, and none is started.

# A port that nothing listens on now.
free_port() {
    python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
}

with_server() {
    local binary=$1 dir port peer pid code=0
    shift
    dir=$(mktemp -d)
    port=$(free_port)
    peer=$(free_port)
    : >"$dir/log"
    # The peer URL decides the ids, so it is the default where it is only advertised.
    "$binary" --name default --data-dir "$dir/data" \
        --listen-client-urls "http://127.0.0.1:$port" --advertise-client-urls "http://127.0.0.1:$port" \
        --listen-peer-urls "http://127.0.0.1:$peer" >"$dir/log" 2>&1 &
    pid=$!
    local waited=0
    until grep -q 'ready to serve client requests' "$dir/log"; do
        if ! kill -0 "$pid" 2>/dev/null || [ $((waited += 1)) -gt 300 ]; then
            echo "$binary did not start:" && tail -n 20 "$dir/log"
            kill "$pid" 2>/dev/null
            return 1
        fi
        sleep 0.1
    done
    ENDPOINT=127.0.0.1:$port "$@" || code=$?
    kill -0 "$pid" 2>/dev/null || { echo "$binary ended:" && tail -n 20 "$dir/log" && code=1; }
    kill "$pid" 2>/dev/null
    wait "$pid" 2>/dev/null
    rm -rf "$dir"
    return $code
}

each_server() {
    local code=0 binary
    if [ -n "${ENDPOINT:-}" ]; then
        "$@"
        return
    fi
    for binary in "${ETCORE:?names the server to test}" ${ETCD:+"$ETCD"}; do
        echo "against $binary"
        with_server "$binary" "$@" || code=1
    done
    return $code
}
