//! The world as the state machines may see it: a disk. One real (`real`), one simulated (`sim`) that loses,
//! reorders and tears what was not flushed. Time and randomness are arguments of the machines, never asked for.

pub mod disk;
pub mod real;
pub mod sim;

pub use disk::{Backing, Disk, File, Open};
