//! Generated from `proto/`: etcd's messages and services, with etcd's names and numbers.
//!
//! The request and response messages serve as the domain types of the whole server: etcd's API *is* the
//! domain here, and a second set of structures with the same fields would only be a place for mistakes.

#![allow(clippy::all, clippy::pedantic)]

pub mod authpb {
    include!(concat!(env!("OUT_DIR"), "/authpb.rs"));
}
pub mod mvccpb {
    include!(concat!(env!("OUT_DIR"), "/mvccpb.rs"));
}
pub mod etcdserverpb {
    include!(concat!(env!("OUT_DIR"), "/etcdserverpb.rs"));
}
pub mod v3electionpb {
    include!(concat!(env!("OUT_DIR"), "/v3electionpb.rs"));
}
pub mod v3lockpb {
    include!(concat!(env!("OUT_DIR"), "/v3lockpb.rs"));
}
pub mod health {
    include!(concat!(env!("OUT_DIR"), "/grpc.health.v1.rs"));
}
