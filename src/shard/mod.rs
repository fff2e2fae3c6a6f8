//! (shard)

pub mod evaluate;
pub mod gather;
pub mod overlay;
pub mod view;

#[cfg(test)]
mod testing;
