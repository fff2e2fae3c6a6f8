//! One Raft group of this node: raft-rs and the group's log as one state machine.
//!
//! ```text
//!   propose ──▶ raft-rs ──ready──▶ log.append ──flush──▶ (disk) ──flushed──▶ on_persist_ready ──▶ delivered
//! ```
//!
//! Promises: an entry is delivered only when it is committed *and* durable in this node's own log (raft-rs
//! delivers up to min(committed, persisted)); entries are delivered in order, each once per start; after a fault
//! nothing more happens. Does not know what the entries mean, who waits for them, or when a flush runs: it hands
//! out the next flush when the one before came back, so that whatever is proposed meanwhile shares it.
//!
//! raft-rs is driven through its asynchronous interface only (`advance_append_async`, `on_persist_ready`); a
//! change of the commit index alone is no reason to flush, it rides with the next one.

use crate::model::{Fault, ShardId};
use crate::raft::{Encoder, MemLog, Payload, codec};
use crate::wal::{Flush, Kind, Log, Recovered};
use ::raft::eraftpb::{ConfState, Entry, HardState, Message, MessageType};
use ::raft::{Config, INVALID_ID, RawNode, StateRole};
use std::collections::VecDeque;

/// An entry that is committed and durable here.
#[derive(Debug)]
pub struct Delivered {
    pub index: u64,
    pub term: u64,
    /// None for the empty entry with which raft-rs begins a term.
    pub payload: Option<Payload>,
}

/// Where a group stands when it is opened: what its tree says.
#[derive(Clone, Debug, Default)]
pub struct Start {
    /// The last entry that the tree holds completely, and its term; 0, 0 in a new store.
    pub applied: (u64, u64),
    pub conf_state: ConfState,
}

/// The number of this node in every group; one node for now.
const NODE: u64 = 1;

impl Start {
    /// A group of a new store: this node is its only voter.
    pub fn birth() -> Self {
        let mut conf_state = ConfState::default();
        conf_state.set_voters(vec![NODE]);
        Start { applied: (0, 0), conf_state }
    }
}

pub struct Group {
    id: ShardId,
    raw: RawNode<MemLog>,
    log: Log,
    encoder: Encoder,
    /// Payloads proposed here and not yet delivered, so that the leader need not decode its own entries.
    own: VecDeque<(u64, u64, Payload)>,
    /// The newest ready with something for the log that no flush carries yet.
    unflushed: Option<u64>,
    /// The flush under way, if any, and the newest ready that is durable with it.
    flushing: Option<Option<u64>>,
    /// A hard state that changed in its commit index only.
    lazy: Option<HardState>,
    delivered: u64,
    /// The highest V that a seal of the log carried when it was opened.
    sealed_v: i64,
    /// V at the newest seal since.
    sealed_under: i64,
}

impl std::fmt::Debug for Group {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "group {} (term {}, delivered {})", self.id, self.term(), self.delivered)
    }
}

impl Group {
    /// From what the log recovered. Refuses a log that does not reach back to what the tree holds.
    pub fn open(id: ShardId, log: Log, recovered: Vec<Recovered>, start: Start) -> Result<Self, Fault> {
        let broken = |why: String| Fault::Broken(format!("group {id}: {why}"));
        let mut mem = MemLog::new(start.applied.0, start.applied.1, start.conf_state);
        let mut hard_state = HardState::default();
        let mut sealed_v = 0;
        for record in recovered {
            match record.kind {
                Kind::Entry => {
                    let entry = codec::decode_entry(&record.body).map_err(|e| broken(e.to_string()))?;
                    mem.append([entry]).map_err(|why| {
                        Fault::Refused(format!(
                            "the log of group {id} does not reach back to what its tree holds ({why}): restore the \
                             missing segments or start from a backup"
                        ))
                    })?;
                }
                Kind::HardState => {
                    hard_state = codec::decode_hard_state(&record.body).map_err(|e| broken(e.to_string()))?;
                }
                Kind::Seal => {
                    let v = record.body.as_ref().try_into().map(i64::from_le_bytes);
                    sealed_v = sealed_v.max(v.map_err(|_| broken("a seal holds no revision".into()))?);
                }
                Kind::Mark => {}
            }
        }
        // The commit index rides with later flushes, so it may lie below what a checkpoint proves, and after
        // the loss of an unacknowledged tail above what is there. Both would be fatal to raft-rs.
        hard_state.commit = hard_state.commit.clamp(start.applied.0, mem.last());
        hard_state.term = hard_state.term.max(mem.last_term());
        mem.hard_state = hard_state;
        let config = Config {
            id: NODE,
            election_tick: 10,
            heartbeat_tick: 1,
            applied: start.applied.0,
            max_size_per_msg: u64::MAX,
            max_inflight_msgs: 256,
            pre_vote: true,
            check_quorum: false,
            ..Default::default()
        };
        let logger = slog::Logger::root(slog::Discard, slog::o!());
        let raw = RawNode::new(&config, mem, &logger).map_err(|e| broken(e.to_string()))?;
        Ok(Group {
            id,
            raw,
            log,
            encoder: Encoder::default(),
            own: VecDeque::new(),
            unflushed: None,
            flushing: None,
            lazy: None,
            delivered: start.applied.0,
            sealed_v,
            sealed_under: 0,
        })
    }

    pub fn id(&self) -> ShardId {
        self.id
    }

    pub fn term(&self) -> u64 {
        self.raw.raft.term
    }

    pub fn leads(&self) -> bool {
        self.raw.raft.state == StateRole::Leader
    }

    /// The node that leads the group as far as this node knows; 0: none.
    pub fn leader(&self) -> u64 {
        if self.raw.raft.leader_id == INVALID_ID { 0 } else { self.raw.raft.leader_id }
    }

    pub fn committed(&self) -> u64 {
        self.raw.raft.raft_log.committed
    }

    /// Index of the newest entry handed out.
    pub fn delivered(&self) -> u64 {
        self.delivered
    }

    /// The highest V of which the seals of the log knew when it was opened.
    pub fn sealed_v(&self) -> i64 {
        self.sealed_v
    }

    /// Entries of the log that are not delivered yet: right after `open`, what there is to replay.
    pub fn undelivered(&self) -> u64 {
        self.raw.raft.raft_log.last_index() - self.delivered
    }

    pub fn log(&self) -> &Log {
        &self.log
    }

    pub fn log_mut(&mut self) -> &mut Log {
        &mut self.log
    }

    /// Asks for the leadership. Only with no ready outstanding (raft-rs panics on a vote that overtakes an
    /// append), which is so until the first proposal after `open`.
    pub fn campaign(&mut self) -> Result<(), Fault> {
        if self.unflushed.is_some() || self.flushing.is_some() {
            return Err(self.broken("campaign with appends outstanding"));
        }
        self.raw.campaign().map_err(|e| self.broken(e))
    }

    fn broken(&self, why: impl std::fmt::Display) -> Fault {
        Fault::Broken(format!("group {}: {why}", self.id))
    }

    /// Proposes one entry. An error means that the reign is over: a revision in it was taken and will not be
    /// logged (case L6).
    pub fn propose(&mut self, payload: Payload) -> Result<u64, Fault> {
        let entry = Entry { data: self.encoder.payload(&payload), ..Default::default() };
        let mut message = Message::default();
        message.set_msg_type(MessageType::MsgPropose);
        message.set_entries(vec![entry].into());
        self.raw.step(message).map_err(|e| self.broken(format_args!("a proposal was dropped: {e}")))?;
        let index = self.raw.raft.raft_log.last_index();
        self.own.push_back((index, self.term(), payload));
        Ok(index)
    }

    pub fn tick(&mut self) {
        if self.leads() {
            self.raw.tick();
        }
    }

    /// Does all that can be done now: hands out what is delivered, fills the log, and returns the next flush if
    /// one is due and none is under way.
    pub fn poll(&mut self, delivered: &mut Vec<Delivered>) -> Result<Option<Flush>, Fault> {
        while self.raw.has_ready() {
            let mut ready = self.raw.ready();
            self.hand_out(ready.take_committed_entries(), delivered)?;
            let must_sync = ready.must_sync();
            if let Some(hard_state) = ready.hs() {
                self.raw.mut_store().hard_state = hard_state.clone();
                self.lazy = Some(hard_state.clone());
            }
            let number = ready.number();
            if must_sync {
                self.write_hard_state();
                for entry in ready.entries() {
                    self.log.append(Kind::Entry, entry.index, self.encoder.entry(entry));
                }
                let entries = ready.take_entries();
                self.raw.mut_store().append(entries).map_err(|why| self.broken(why))?;
            }
            self.raw.advance_append_async(ready);
            if must_sync {
                self.unflushed = Some(number);
            } else if self.unflushed.is_none() && self.flushing.is_none() {
                self.raw.on_persist_ready(number);
            } else if let Some(waiting) =
                self.unflushed.as_mut().or(self.flushing.as_mut().and_then(Option::as_mut))
            {
                // Nothing of its own to persist: it counts as persisted with what went before.
                *waiting = number;
            }
            #[cfg(feature = "mutations")]
            if crate::model::mutation::on(crate::model::mutation::Mutation::AcknowledgeBeforePersist) {
                self.raw.on_persist_ready(number);
            }
        }
        Ok(self.next_flush())
    }

    /// The next flush, if there is something to write and nothing under way.
    fn next_flush(&mut self) -> Option<Flush> {
        if self.flushing.is_some() || self.unflushed.is_none() {
            return None;
        }
        let flush = self.log.flush()?;
        // What does not fit into one flush follows with the next; the readies are durable with the last.
        self.flushing = Some(if self.log.pending() { None } else { self.unflushed.take() });
        Some(flush)
    }

    fn write_hard_state(&mut self) {
        if let Some(hard_state) = self.lazy.take() {
            self.log.append(Kind::HardState, 0, self.encoder.hard_state(&hard_state));
        }
    }

    fn hand_out(&mut self, entries: Vec<Entry>, delivered: &mut Vec<Delivered>) -> Result<(), Fault> {
        for entry in entries {
            self.delivered = entry.index;
            let payload = if entry.data.is_empty() { None } else { Some(self.payload_of(&entry)?) };
            delivered.push(Delivered { index: entry.index, term: entry.term, payload });
        }
        // Raft's "applied" moves at delivery: it never waits for V (case L4).
        self.raw.advance_apply_to(self.delivered);
        self.raw.mut_store().release(self.delivered);
        Ok(())
    }

    fn payload_of(&mut self, entry: &Entry) -> Result<Payload, Fault> {
        while let Some((index, term, payload)) = self.own.pop_front() {
            if index > entry.index {
                self.own.push_front((index, term, payload));
                break;
            }
            if (index, term) == (entry.index, entry.term) {
                return Ok(payload);
            }
        }
        codec::decode_payload(&entry.data)
            .map_err(|e| self.broken(format_args!("entry {}: {e}", entry.index)))
    }

    /// A flush reached the disk. An error from the disk never comes here: the shell ends the process (case D3).
    pub fn flushed(&mut self, flush: Flush) -> Result<(), Fault> {
        self.log.flushed(flush)?;
        if let Some(number) = self.flushing.take().flatten() {
            self.raw.on_persist_ready(number);
        }
        Ok(())
    }

    /// After a while without work: a seal with the V of now makes the acknowledged tail detectable (case D2). `still`:
    /// V has not moved for a while; then a log that was sealed under a lower V is sealed again, so that each proves
    /// what the others may lose (case D8). What the log carries over from segments that are to go rides with it.
    /// None if there is nothing to write.
    pub fn seal(&mut self, v: i64, still: bool) -> Option<Flush> {
        if self.flushing.is_some() || self.unflushed.is_some() {
            return None;
        }
        #[cfg(feature = "mutations")]
        let v =
            if crate::model::mutation::on(crate::model::mutation::Mutation::SealWithoutV) { 0 } else { v };
        #[cfg(feature = "mutations")]
        let still = still && !crate::model::mutation::on(crate::model::mutation::Mutation::SealedOnce);
        let body = v.to_le_bytes();
        if !self.log.pending() && !self.log.seal(&body) {
            if !still || v <= self.sealed_under {
                return None;
            }
            self.log.append(Kind::Seal, 0, &body);
        }
        let flush = self.log.flush()?;
        self.sealed_under = v;
        self.flushing = Some(None);
        Some(flush)
    }

    /// A flush is under way: what is proposed now waits for the next.
    pub fn is_flushing(&self) -> bool {
        self.flushing.is_some()
    }

    /// Everything in the log is delivered.
    pub fn is_settled(&self) -> bool {
        self.delivered == self.raw.raft.raft_log.last_index()
    }

    /// Everything is delivered and durable.
    pub fn is_quiet(&self) -> bool {
        self.unflushed.is_none() && self.flushing.is_none() && self.own.is_empty()
    }
}
