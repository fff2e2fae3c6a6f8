//! Bytes of Raft entries, hard states and payloads (`schemas/log.fbs`).
//!
//! Decoding verifies before it reads: a body passed its checksum, but a file may come from another version or
//! another program. Keys and values of a decoded record are slices of the entry, not copies.

use super::log_generated::etcore::log as fb;
use crate::model::record::Parts;
use crate::model::{Change, Epoch, KeyRange, KeyValue, Record};
use ::raft::eraftpb;
use bytes::Bytes;
use flatbuffers::{FlatBufferBuilder, WIPOffset};
use smallvec::SmallVec;

/// The data of a Raft entry.
#[derive(Clone, Debug, PartialEq)]
pub struct Payload {
    pub epoch: Epoch,
    /// The lead node's V when the entry was proposed: one of the bases of recovery (design 5.5).
    pub v: i64,
    pub body: Body,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Body {
    Batch(Vec<Record>),
    Cut { r_star: i64 },
    Barrier,
    Init(Birth),
    Reign { node: u64 },
    Compact { revision: i64 },
}

/// What a store is born with; the first entry of the meta log.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Birth {
    pub cluster_id: u64,
    pub member_id: u64,
    pub name: String,
    pub peer_urls: Vec<String>,
    pub client_urls: Vec<String>,
    /// As `RangeMap::to_bytes`.
    pub range_map: Bytes,
}

/// Makes bytes; keeps its buffer from one call to the next.
#[derive(Default)]
pub struct Encoder {
    builder: FlatBufferBuilder<'static>,
}

impl Encoder {
    pub fn payload(&mut self, payload: &Payload) -> Bytes {
        let b = &mut self.builder;
        b.reset();
        let mut args = fb::PayloadArgs { epoch: payload.epoch, v: payload.v, ..Default::default() };
        match &payload.body {
            Body::Batch(records) => {
                args.kind = fb::PayloadKind::Batch;
                let records: Vec<_> = records.iter().map(|r| record(b, r)).collect();
                args.records = Some(b.create_vector(&records));
            }
            Body::Cut { r_star } => {
                args.kind = fb::PayloadKind::Cut;
                args.r_star = *r_star;
            }
            Body::Barrier => args.kind = fb::PayloadKind::Barrier,
            Body::Init(birth) => {
                args.kind = fb::PayloadKind::Init;
                let strings = |b: &mut FlatBufferBuilder<'static>, list: &[String]| {
                    let list: Vec<_> = list.iter().map(|s| b.create_string(s)).collect();
                    b.create_vector(&list)
                };
                let init = fb::InitArgs {
                    cluster_id: birth.cluster_id,
                    member_id: birth.member_id,
                    name: Some(b.create_string(&birth.name)),
                    peer_urls: Some(strings(b, &birth.peer_urls)),
                    client_urls: Some(strings(b, &birth.client_urls)),
                    range_map: Some(b.create_vector(&birth.range_map)),
                };
                args.init = Some(fb::Init::create(b, &init));
            }
            Body::Reign { node } => {
                args.kind = fb::PayloadKind::Reign;
                args.node = *node;
            }
            Body::Compact { revision } => {
                args.kind = fb::PayloadKind::Compact;
                args.revision = *revision;
            }
        }
        let root = fb::Payload::create(b, &args);
        b.finish(root, None);
        Bytes::copy_from_slice(b.finished_data())
    }

    /// The log body of an entry; valid until the next call.
    pub fn entry(&mut self, entry: &eraftpb::Entry) -> &[u8] {
        let b = &mut self.builder;
        b.reset();
        let args = fb::EntryArgs {
            term: entry.term,
            index: entry.index,
            type_: entry.entry_type as u8,
            data: Some(b.create_vector(&entry.data)),
            context: (!entry.context.is_empty()).then(|| b.create_vector(&entry.context)),
        };
        let root = fb::Entry::create(b, &args);
        b.finish(root, None);
        b.finished_data()
    }

    /// The log body of a hard state; valid until the next call.
    pub fn hard_state(&mut self, hard_state: &eraftpb::HardState) -> &[u8] {
        let b = &mut self.builder;
        b.reset();
        let args =
            fb::HardStateArgs { term: hard_state.term, vote: hard_state.vote, commit: hard_state.commit };
        let root = fb::HardState::create(b, &args);
        b.finish(root, None);
        b.finished_data()
    }
}

fn record<'b>(b: &mut FlatBufferBuilder<'b>, record: &Record) -> WIPOffset<fb::Record<'b>> {
    let changes: SmallVec<[_; 4]> = record.changes.iter().map(|c| change(b, c)).collect();
    let args = fb::RecordArgs {
        revision: record.rev,
        parts: (!record.parts.is_empty()).then(|| b.create_vector(&record.parts)),
        changes: Some(b.create_vector(&changes)),
    };
    fb::Record::create(b, &args)
}

fn change<'b>(b: &mut FlatBufferBuilder<'b>, change: &Change) -> WIPOffset<fb::Change<'b>> {
    let args = match change {
        Change::Put { sub, kv } => fb::ChangeArgs {
            kind: fb::ChangeKind::Put,
            sub: *sub,
            key: Some(b.create_vector(&kv.key)),
            value: Some(b.create_vector(&kv.value)),
            create_revision: kv.create_revision,
            version: kv.version,
            lease: kv.lease,
            ..Default::default()
        },
        Change::Delete { sub, key } => fb::ChangeArgs {
            kind: fb::ChangeKind::Delete,
            sub: *sub,
            key: Some(b.create_vector(key)),
            ..Default::default()
        },
        Change::DeleteRange { first_sub, count, range, lease } => fb::ChangeArgs {
            kind: fb::ChangeKind::DeleteRange,
            sub: *first_sub,
            count: *count,
            lease: *lease,
            key: Some(b.create_vector(&range.start)),
            end: range.end.as_ref().map(|end| b.create_vector(end)),
            ..Default::default()
        },
    };
    fb::Change::create(b, &args)
}

/// Why bytes could not be decoded.
#[derive(Debug, thiserror::Error)]
#[error("not a {what}: {why}")]
pub struct Undecodable {
    what: &'static str,
    why: String,
}

fn undecodable(what: &'static str) -> impl Fn(flatbuffers::InvalidFlatbuffer) -> Undecodable {
    move |e| Undecodable { what, why: e.to_string() }
}

fn missing(what: &'static str, field: &str) -> Undecodable {
    Undecodable { what, why: format!("{field} is missing") }
}

/// How much a verifier may walk: a batch may hold many records, each of three tables.
fn verifier() -> flatbuffers::VerifierOptions {
    flatbuffers::VerifierOptions { max_tables: 1 << 24, max_apparent_size: 1 << 31, ..Default::default() }
}

pub fn decode_payload(data: &Bytes) -> Result<Payload, Undecodable> {
    const WHAT: &str = "payload";
    let p = flatbuffers::root_with_opts::<fb::Payload>(&verifier(), data).map_err(undecodable(WHAT))?;
    let body = match p.kind() {
        fb::PayloadKind::Batch => {
            let records = p.records().ok_or_else(|| missing(WHAT, "records"))?;
            Body::Batch(records.iter().map(|r| decode_record(data, r)).collect::<Result<_, _>>()?)
        }
        fb::PayloadKind::Cut => Body::Cut { r_star: p.r_star() },
        fb::PayloadKind::Barrier => Body::Barrier,
        fb::PayloadKind::Init => {
            let init = p.init().ok_or_else(|| missing(WHAT, "init"))?;
            let strings = |list: Option<flatbuffers::Vector<flatbuffers::ForwardsUOffset<&str>>>| {
                list.map(|l| l.iter().map(str::to_owned).collect()).unwrap_or_default()
            };
            Body::Init(Birth {
                cluster_id: init.cluster_id(),
                member_id: init.member_id(),
                name: init.name().unwrap_or_default().to_owned(),
                peer_urls: strings(init.peer_urls()),
                client_urls: strings(init.client_urls()),
                range_map: slice(data, init.range_map()),
            })
        }
        fb::PayloadKind::Reign => Body::Reign { node: p.node() },
        fb::PayloadKind::Compact => Body::Compact { revision: p.revision() },
        other => return Err(Undecodable { what: WHAT, why: format!("kind {} is unknown", other.0) }),
    };
    Ok(Payload { epoch: p.epoch(), v: p.v(), body })
}

fn slice(data: &Bytes, vector: Option<flatbuffers::Vector<u8>>) -> Bytes {
    vector.map(|v| data.slice_ref(v.bytes())).unwrap_or_default()
}

fn decode_record(data: &Bytes, r: fb::Record) -> Result<Record, Undecodable> {
    const WHAT: &str = "record";
    let rev = r.revision();
    let parts: Parts = r.parts().map(|p| p.iter().collect()).unwrap_or_default();
    let changes = r.changes().ok_or_else(|| missing(WHAT, "changes"))?;
    let changes = changes
        .iter()
        .map(|c| match c.kind() {
            fb::ChangeKind::Put => Ok(Change::Put {
                sub: c.sub(),
                kv: KeyValue {
                    key: slice(data, c.key()),
                    create_revision: c.create_revision(),
                    mod_revision: rev,
                    version: c.version(),
                    value: slice(data, c.value()),
                    lease: c.lease(),
                },
            }),
            fb::ChangeKind::Delete => Ok(Change::Delete { sub: c.sub(), key: slice(data, c.key()) }),
            fb::ChangeKind::DeleteRange => Ok(Change::DeleteRange {
                first_sub: c.sub(),
                count: c.count(),
                range: KeyRange { start: slice(data, c.key()), end: c.end().map(|e| slice(data, Some(e))) },
                lease: c.lease(),
            }),
            other => Err(Undecodable { what: WHAT, why: format!("change kind {} is unknown", other.0) }),
        })
        .collect::<Result<_, _>>()?;
    Ok(Record { rev, parts, changes })
}

/// An entry from its log body; the data is a slice of it.
pub fn decode_entry(body: &Bytes) -> Result<eraftpb::Entry, Undecodable> {
    const WHAT: &str = "log entry";
    let e = flatbuffers::root_with_opts::<fb::Entry>(&verifier(), body).map_err(undecodable(WHAT))?;
    let entry_type = match e.type_() {
        0 => eraftpb::EntryType::EntryNormal,
        1 => eraftpb::EntryType::EntryConfChange,
        2 => eraftpb::EntryType::EntryConfChangeV2,
        other => return Err(Undecodable { what: WHAT, why: format!("entry type {other} is unknown") }),
    };
    Ok(eraftpb::Entry {
        term: e.term(),
        index: e.index(),
        entry_type,
        data: slice(body, e.data()),
        context: slice(body, e.context()),
        ..Default::default()
    })
}

pub fn decode_hard_state(body: &[u8]) -> Result<eraftpb::HardState, Undecodable> {
    let h =
        flatbuffers::root_with_opts::<fb::HardState>(&verifier(), body).map_err(undecodable("hard state"))?;
    let (term, vote, commit) = (h.term(), h.vote(), h.commit());
    Ok(eraftpb::HardState { term, vote, commit, ..Default::default() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use smallvec::smallvec;

    fn payloads() -> Vec<Payload> {
        let kv = KeyValue {
            key: Bytes::from_static(b"a\0b"),
            create_revision: 3,
            mod_revision: 9,
            version: 2,
            value: Bytes::from(vec![7; 5000]),
            lease: -5,
        };
        let range = KeyRange { start: Bytes::from_static(b"k"), end: None };
        let bounded = KeyRange { start: Bytes::new(), end: Some(Bytes::from_static(b"z")) };
        let batch = Body::Batch(vec![
            Record {
                rev: 9,
                parts: smallvec![1, 4],
                changes: smallvec![
                    Change::Put { sub: 0, kv },
                    Change::Delete { sub: 1, key: Bytes::new() },
                    Change::DeleteRange { first_sub: 2, count: 2000, range, lease: 0 },
                    Change::DeleteRange { first_sub: 2002, count: 1, range: bounded, lease: 77 },
                ],
            },
            Record { rev: 10, parts: smallvec![], changes: smallvec![] },
        ]);
        let birth = Birth {
            cluster_id: u64::MAX,
            member_id: 1,
            name: "näme".into(),
            peer_urls: vec!["http://a".into(), "http://b".into()],
            client_urls: vec![],
            range_map: Bytes::from_static(b"map"),
        };
        [
            batch,
            Body::Cut { r_star: i64::MAX },
            Body::Barrier,
            Body::Init(birth),
            Body::Reign { node: 8 },
            Body::Compact { revision: 0 },
        ]
        .into_iter()
        .map(|body| Payload { epoch: 12, v: -1, body })
        .collect()
    }

    #[test]
    fn payloads_round_trip() {
        let mut encoder = Encoder::default();
        for payload in payloads() {
            let bytes = encoder.payload(&payload);
            assert_eq!(decode_payload(&bytes).unwrap(), payload);
        }
    }

    #[test]
    fn entries_and_hard_states_round_trip() {
        let mut encoder = Encoder::default();
        let mut entry = eraftpb::Entry::default();
        (entry.term, entry.index) = (4, 77);
        entry.entry_type = eraftpb::EntryType::EntryConfChangeV2;
        entry.data = Bytes::from_static(b"data");
        let body = Bytes::copy_from_slice(encoder.entry(&entry));
        assert_eq!(decode_entry(&body).unwrap(), entry);
        let mut hard_state = eraftpb::HardState::default();
        (hard_state.term, hard_state.vote, hard_state.commit) = (4, 1, 76);
        assert_eq!(decode_hard_state(encoder.hard_state(&hard_state)).unwrap(), hard_state);
    }

    #[test]
    fn bytes_from_elsewhere_never_panic() {
        let mut encoder = Encoder::default();
        for payload in payloads() {
            let bytes = encoder.payload(&payload);
            for at in 0..bytes.len().min(200) {
                for flip in [1, 0x80, 0xff] {
                    let mut bad = bytes.to_vec();
                    bad[at] ^= flip;
                    let _ = decode_payload(&bad.into());
                }
                let _ = decode_payload(&bytes.slice(..at));
                let _ = decode_entry(&bytes.slice(at..));
                let _ = decode_hard_state(&bytes[at..]);
            }
        }
    }
}
