//! Every bound of the server in one place, with the relations between them asserted at compile time.

/// Page of the tree, bytes. Chosen by measuring bytes and CPU per put (`benches/`).
pub const PAGE_BYTES: usize = 8192;
/// A value up to this length stands in the leaf itself; a longer one in overflow pages.
pub const VALUE_INLINE_BYTES_MAX: usize = PAGE_BYTES / 4;
/// A deletion of more keys than this logs its range instead of its keys (design 3.2).
/// A simulator that breaks rules has few keys, and smaller limits so that they matter.
pub const DELETE_KEYS_LOGGED_MAX: usize = if cfg!(feature = "mutations") { 3 } else { 1000 };
/// Keys of such a deletion that are expanded in one slice: about a millisecond's work.
pub const DELETE_KEYS_SLICE: usize = if cfg!(feature = "mutations") { 2 } else { 250 };
/// Reads of more keys or bytes than these run off the cores.
pub const READ_ON_CORE_KEYS_MAX: usize = 1000;
pub const READ_ON_CORE_BYTES_MAX: usize = 1 << 20;
/// Reads off the cores that one core has under way; more wait.
pub const LONG_JOBS_MAX: usize = 64;
/// Block of the log: the unit in which O_DIRECT writes.
pub const LOG_BLOCK_BYTES: usize = 4096;
/// Segment of the log, bytes.
pub const LOG_SEGMENT_BYTES: u64 = 64 << 20;
/// One entry of the log carries records up to this length, or one longer record.
pub const BATCH_BYTES_MAX: usize = 1 << 20;
/// Records taken but not yet visible, over the whole node; beyond it new work is refused.
pub const REVISIONS_IN_FLIGHT_MAX: i64 = 100_000;
/// Bytes of one shard's records that are logged or waiting but not yet applied; beyond it new work is refused.
pub const OVERLAY_BYTES_MAX: usize = 256 << 20;
/// An idle shard renews its meta page once V is this far past the one in it (design 5.5).
pub const META_PAGE_REVISIONS_BEHIND_MAX: i64 = 100_000;

const _: () = assert!(PAGE_BYTES >= 4096 && PAGE_BYTES <= 16384 && PAGE_BYTES.is_power_of_two());
const _: () = assert!((LOG_SEGMENT_BYTES as usize).is_multiple_of(LOG_BLOCK_BYTES));
const _: () = assert!(VALUE_INLINE_BYTES_MAX * 3 < PAGE_BYTES);
