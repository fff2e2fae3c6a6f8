//! Generated from `proto/`: etcd's messages and services, with etcd's names and numbers.
//!
//! The request and response messages serve as the domain types of the whole server: etcd's API *is* the
//! domain here, and a second set of structures with the same fields would only be a place for mistakes.

#![allow(clippy::all, clippy::pedantic)]

use prost::Message;
use std::marker::PhantomData;
use tonic::codec::BufferSettings;
use tonic_prost::{ProstCodec, ProstDecoder, ProstEncoder};

/// prost with small buffers: the library's 8 KiB for each message of each call cost more than the messages.
#[derive(Debug)]
pub struct Codec<T, U>(PhantomData<(T, U)>);

const BUFFERS: fn() -> BufferSettings = || BufferSettings::new(512, 32 << 10);

impl<T, U> Default for Codec<T, U> {
    fn default() -> Self {
        Codec(PhantomData)
    }
}

impl<T, U> tonic::codec::Codec for Codec<T, U>
where
    T: Message + Send + 'static,
    U: Message + Default + Send + 'static,
{
    type Encode = T;
    type Decode = U;
    type Encoder = ProstEncoder<T>;
    type Decoder = ProstDecoder<U>;

    fn encoder(&mut self) -> Self::Encoder {
        ProstCodec::<T, U>::raw_encoder(BUFFERS())
    }

    fn decoder(&mut self) -> Self::Decoder {
        ProstCodec::<T, U>::raw_decoder(BUFFERS())
    }
}

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
