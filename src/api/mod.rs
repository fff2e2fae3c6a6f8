//! The client API: gRPC services over a [`node::Node`], and what HTTP/1 gets. Requests are checked and answers
//! worded here; what they do to the store is not known here.

pub mod cluster;
pub mod health;
pub mod http;
pub mod kv;
pub mod maintenance;
pub mod node;
pub mod services;
pub mod status;
pub mod transport;
pub mod unimplemented;
pub mod validate;

pub use node::{Limits, Node};
pub use services::Services;
