//! What runs the machines. `core` and `control` are the machines of one executor and of the control thread, pure
//! values that the simulator steps; `node` runs them on executors, mailboxes and threads for work that blocks.
//! It knows time and threads, which no floor below does; it does not know what clients ask for.

pub mod boot;
pub mod control;
pub mod core;
pub mod executor;
pub mod job;
pub mod mailbox;
pub mod message;
pub mod node;
mod watchdog;
pub mod worker;

pub use self::core::{Core, Identity, Now, Pace};
pub use boot::Home;
pub use control::Control;
pub use job::{Job, Lane};
pub use message::{Effect, Message};
