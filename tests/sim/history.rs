//! What the store should be: the history of all visible revisions, as found in the trees, and whether every answer
//! was right at the revision that it names.
//!
//! The content of a revision, once seen, never changes; revisions are contiguous; a change over several shards is
//! whole; an answer is right if a one-threaded model that replays the history gives it at its revision; an answer
//! names no revision below one that was shown to anybody before the request began.

use bytes::Bytes;
use etcore::model::{Answer, Change, KeyRange, KeyValue, KvRef, Rejection, Request, Response, ShardId};
use etcore::proto::etcdserverpb as pb;
use etcore::shard::evaluate;
use etcore::shard::view::{KeyMeta, View, Visit};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;

/// One stored change, as a tree holds it.
#[derive(Clone, Debug, PartialEq)]
pub struct Stored {
    pub tombstone: bool,
    pub kv: KeyValue,
}

/// One revision: its changes by sub-revision, each with its shard, and the participants that a part names.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Revision {
    changes: BTreeMap<u32, (ShardId, Stored)>,
    parts: BTreeSet<ShardId>,
}

#[derive(Debug)]
struct Asked {
    request: Request,
    /// The highest revision shown to anybody before the request began.
    floor: i64,
}

#[derive(Debug)]
struct Answered {
    asked: Asked,
    answer: Answer,
}

type State = BTreeMap<Bytes, KeyValue>;

#[derive(Debug, Default)]
pub struct History {
    revisions: BTreeMap<i64, Revision>,
    /// `states[r]`: the store at revision r + 1; filled as far as the revisions are complete.
    states: Vec<State>,
    asked: BTreeMap<u64, Asked>,
    unchecked: Vec<Answered>,
    shown: i64,
    /// The highest compaction point that was answered or may have been.
    pub compacted: i64,
    compact_asked: i64,
    /// Revisions that an answer claimed, with the token.
    claimed: BTreeMap<i64, String>,
    pub answers: u64,
}

impl History {
    pub fn new() -> Self {
        History {
            states: vec![State::new()],
            shown: 1,
            compacted: -1,
            compact_asked: -1,
            ..Default::default()
        }
    }

    /// The highest revision that any client was shown.
    pub fn shown(&self) -> i64 {
        self.shown
    }

    pub fn asked(&mut self, token: u64, request: Request) {
        if let Request::Compact(compact) = &request {
            self.compact_asked = self.compact_asked.max(compact.revision);
        }
        self.asked.insert(token, Asked { request, floor: self.shown });
    }

    pub fn answered(&mut self, token: u64, answer: Answer) -> Result<(), String> {
        let Some(asked) = self.asked.remove(&token) else {
            return Err(format!("request {token} was answered twice"));
        };
        self.answers += 1;
        if let Some(revision) = revision_of(&answer) {
            if revision < asked.floor {
                return Err(format!(
                    "stale: {:?} answered at revision {revision}, but {} was shown before it began",
                    asked.request, asked.floor
                ));
            }
            self.shown = self.shown.max(revision);
        }
        if let (Request::Compact(compact), Ok(_)) = (&asked.request, &answer) {
            self.compacted = self.compacted.max(compact.revision);
        }
        self.unchecked.push(Answered { asked, answer });
        Ok(())
    }

    /// The power was cut: whoever waits learns nothing.
    pub fn forget_asked(&mut self) {
        self.asked.clear();
    }

    pub fn in_flight(&self) -> usize {
        self.asked.len()
    }

    /// Something that stands in a shard's tree.
    pub fn stored(
        &mut self,
        shard: ShardId,
        rev: i64,
        sub: u32,
        stored: Stored,
        parts: &[ShardId],
    ) -> Result<(), String> {
        let known = self.revisions.entry(rev).or_default();
        known.parts.extend(parts);
        match known.changes.get(&sub) {
            None if rev <= self.states.len() as i64 => Err(format!(
                "revision {rev} grew after it was complete: {shard} now holds sub {sub} {stored:?}"
            )),
            None => {
                known.changes.insert(sub, (shard, stored));
                Ok(())
            }
            Some(before) if *before == (shard, stored.clone()) => Ok(()),
            Some(before) => Err(format!(
                "revision {rev}.{sub} changed: it was {before:?}, now shard {shard} holds {stored:?}"
            )),
        }
    }

    /// Every shard's tree holds everything up to `v`: the revisions up to there are complete.
    pub fn complete(&mut self, v: i64) -> Result<(), String> {
        while (self.states.len() as i64) < v {
            let rev = self.states.len() as i64 + 1;
            let Some(revision) = self.revisions.get(&rev) else {
                return Err(format!("revision {rev} is visible and stands nowhere"));
            };
            let shards: BTreeSet<_> = revision.changes.values().map(|(shard, _)| *shard).collect();
            if let Some(missing) = revision.parts.iter().find(|part| !shards.contains(part)) {
                return Err(format!("revision {rev} is visible without its part in shard {missing}"));
            }
            if shards.len() > 1 && revision.parts != shards {
                return Err(format!("revision {rev} names {:?} and stands in {shards:?}", revision.parts));
            }
            let mut state = self.states[rev as usize - 2].clone();
            for (_, stored) in revision.changes.values() {
                if stored.tombstone {
                    state.remove(&stored.kv.key);
                } else {
                    state.insert(stored.kv.key.clone(), stored.kv.clone());
                }
            }
            self.states.push(state);
        }
        self.check()
    }

    fn state(&self, rev: i64) -> Option<&State> {
        self.states.get(usize::try_from(rev - 1).ok()?)
    }

    pub fn newest(&self) -> (i64, &State) {
        (self.states.len() as i64, &self.states[self.states.len() - 1])
    }

    fn check(&mut self) -> Result<(), String> {
        let complete = self.states.len() as i64;
        let (ready, later): (Vec<_>, Vec<_>) = std::mem::take(&mut self.unchecked)
            .into_iter()
            .partition(|answered| revision_of(&answered.answer).is_none_or(|revision| revision <= complete));
        self.unchecked = later;
        ready.iter().try_for_each(|answered| self.check_one(answered))
    }

    /// All answers were checked.
    pub fn settle(&mut self) -> Result<(), String> {
        match self.unchecked.first() {
            None => Ok(()),
            Some(answered) => Err(format!("an answer names a revision that nobody holds: {answered:?}")),
        }
    }

    fn check_one(&mut self, answered: &Answered) -> Result<(), String> {
        let Answered { asked, answer } = answered;
        let wrong = |want: &dyn std::fmt::Debug| {
            Err(format!("wrong answer to {:?}:\n  got  {answer:?}\n  want {want:?}", asked.request))
        };
        let response = match answer {
            Ok(response) => response,
            // A rejection names no revision; only those are let through that the workload can provoke.
            Err(Rejection::Compacted) if self.compact_asked >= 0 => return Ok(()),
            Err(Rejection::FutureRev | Rejection::KeyNotFound | Rejection::LeaseNotFound) => return Ok(()),
            Err(rejection) => return wrong(&rejection),
        };
        let Some(revision) = revision_of(answer) else { return Ok(()) };
        match response {
            Response::Put(_) | Response::DeleteRange(_) | Response::Txn(_) => {
                self.check_change(&asked.request, response, revision)
            }
            Response::Range(_) => {
                let view = self.view(revision)?;
                match evaluate::prepare(&view, &asked.request) {
                    Ok(prepared) => {
                        let want = evaluate::execute(&view, prepared, revision).response;
                        if bare(response) == want { Ok(()) } else { wrong(&want) }
                    }
                    Err(rejection) => wrong(&rejection),
                }
            }
            _ => Ok(()),
        }
    }

    /// A change is right if it gives this answer and these effects on the state before its revision; one that
    /// changed nothing, on the state at its revision.
    fn check_change(&mut self, request: &Request, response: &Response, revision: i64) -> Result<(), String> {
        let before = self.view(revision - 1);
        if let Ok(view) = &before
            && let Ok(prepared) = evaluate::prepare(view, request)
            && prepared.changes
        {
            let outcome = evaluate::execute(view, prepared, revision);
            if outcome.response == bare(response) && self.stands(revision, &outcome.changes, view.state) {
                return match self.claimed.insert(revision, format!("{request:?}")) {
                    None => Ok(()),
                    Some(other) => {
                        Err(format!("revision {revision} was given to {request:?} and to {other}"))
                    }
                };
            }
        }
        let view = self.view(revision)?;
        if let Ok(prepared) = evaluate::prepare(&view, request)
            && !prepared.changes
            && evaluate::execute(&view, prepared, revision).response == bare(response)
        {
            return Ok(());
        }
        Err(format!(
            "{request:?} was answered {response:?}, which it gives neither at {} nor at {revision}; that \
             revision holds {:?}",
            revision - 1,
            self.revisions.get(&revision)
        ))
    }

    /// Whether the revision holds exactly these changes.
    fn stands(&self, revision: i64, changes: &[Change], state: &State) -> bool {
        let mut want = BTreeMap::new();
        // A range means the keys that live just before its change, not before the revision.
        let mut live: BTreeSet<Bytes> = state.keys().cloned().collect();
        let tombstone = |key: &Bytes| Stored {
            tombstone: true,
            kv: KeyValue { key: key.clone(), mod_revision: revision, ..Default::default() },
        };
        for change in changes {
            match change {
                Change::Put { sub, kv } => {
                    live.insert(kv.key.clone());
                    want.insert(*sub, Stored { tombstone: false, kv: kv.clone() });
                }
                Change::Delete { sub, key } => {
                    live.remove(key);
                    want.insert(*sub, tombstone(key));
                }
                Change::DeleteRange { first_sub, range, .. } => {
                    let dead: Vec<Bytes> = live.iter().filter(|key| range.contains(key)).cloned().collect();
                    live.retain(|key| !range.contains(key));
                    want.extend((*first_sub..).zip(dead.iter().map(tombstone)));
                }
            }
        }
        let found = self.revisions.get(&revision).map(|found| &found.changes);
        found.is_some_and(|found| {
            found.len() == want.len() && found.iter().all(|(sub, (_, stored))| want.get(sub) == Some(stored))
        })
    }

    fn view(&self, revision: i64) -> Result<At<'_>, String> {
        let state = self.state(revision).ok_or_else(|| format!("there is no revision {revision}"))?;
        Ok(At { history: self, revision, state })
    }
}

/// The store at one revision.
struct At<'h> {
    history: &'h History,
    revision: i64,
    state: &'h State,
}

impl At<'_> {
    fn at(&self, at: Option<i64>) -> &State {
        at.and_then(|at| self.history.state(at.min(self.revision))).unwrap_or(self.state)
    }
}

impl View for At<'_> {
    fn get(&self, key: &[u8]) -> Option<KeyValue> {
        self.state.get(key).cloned()
    }
    fn meta(&self, key: &[u8]) -> Option<KeyMeta> {
        self.state.get(key).map(KeyMeta::from)
    }
    fn get_at(&self, key: &[u8], rev: i64) -> Option<KeyValue> {
        self.at(Some(rev)).get(key).cloned()
    }
    fn scan(&self, range: &KeyRange, at: Option<i64>, visit: &mut Visit<'_>) {
        for (_, kv) in self.at(at).iter().filter(|(key, _)| range.contains(key)) {
            if let ControlFlow::Break(()) = visit(KvRef::from(kv)) {
                return;
            }
        }
    }
    fn count(&self, range: &KeyRange, at: Option<i64>) -> u64 {
        self.at(at).keys().filter(|key| range.contains(key)).count() as u64
    }
    fn point(&self) -> i64 {
        self.revision
    }
    fn compacted(&self) -> i64 {
        -1
    }
    fn lease_exists(&self, _lease: i64) -> bool {
        false
    }
}

fn header(response: &Response) -> Option<&pb::ResponseHeader> {
    match response {
        Response::Range(r) => r.header.as_ref(),
        Response::Put(r) => r.header.as_ref(),
        Response::DeleteRange(r) => r.header.as_ref(),
        Response::Txn(r) => r.header.as_ref(),
        Response::Compact(r) => r.header.as_ref(),
        Response::HashKv(r) => r.header.as_ref(),
        Response::Status(r) => r.header.as_ref(),
        Response::RangeEncoded(_) | Response::MemberList(_) | Response::Defragment => None,
    }
}

fn revision_of(answer: &Answer) -> Option<i64> {
    header(answer.as_ref().ok()?).map(|header| header.revision)
}

/// The response with the revision alone in its header, as evaluation makes it.
fn bare(response: &Response) -> Response {
    let mut response = response.clone();
    let header = match &mut response {
        Response::Range(r) => &mut r.header,
        Response::Put(r) => &mut r.header,
        Response::DeleteRange(r) => &mut r.header,
        Response::Txn(r) => &mut r.header,
        _ => return response,
    };
    *header = header.take().map(|h| pb::ResponseHeader { revision: h.revision, ..Default::default() });
    response
}
