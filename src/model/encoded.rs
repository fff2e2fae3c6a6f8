//! A long RangeResponse as bytes, in pieces: made where it disturbs nobody, sent piece by piece.
//!
//! The pieces together are exactly the encoded message. Knows nothing of who made it or who sends it.

use crate::proto::etcdserverpb::RangeResponse;
use bytes::{Bytes, BytesMut};
use prost::Message;
use prost::encoding;

/// Pieces are about this long; a longer key-value is a piece of its own.
const PIECE_BYTES: usize = 64 << 10;
/// The number of the field `kvs` (etcd: api.md 5).
const KVS: u32 = 2;

/// Encodes a response, consuming it as it goes.
pub fn encode(mut response: RangeResponse) -> Vec<Bytes> {
    let kvs = std::mem::take(&mut response.kvs);
    let mut pieces = Vec::new();
    let mut piece = BytesMut::with_capacity(PIECE_BYTES);
    // Fields may stand in any order: the short ones first.
    response.encode_raw(&mut piece);
    for kv in kvs {
        if piece.len() + kv.encoded_len() + 16 > PIECE_BYTES && !piece.is_empty() {
            pieces.push(std::mem::replace(&mut piece, BytesMut::with_capacity(PIECE_BYTES)).freeze());
        }
        encoding::message::encode(KVS, &kv, &mut piece);
    }
    if !piece.is_empty() {
        pieces.push(piece.freeze());
    }
    pieces
}

/// The message again, for those who need its fields.
pub fn decode(pieces: &[Bytes]) -> Result<RangeResponse, prost::DecodeError> {
    RangeResponse::decode(Bytes::from(pieces.concat()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::KeyValue;
    use crate::proto::etcdserverpb::ResponseHeader;

    #[test]
    fn the_pieces_are_the_message() {
        let kv = |i: usize| KeyValue {
            key: Bytes::from(format!("key{i}")),
            value: Bytes::from(vec![i as u8; if i == 7 { 200_000 } else { 900 }]),
            mod_revision: i as i64,
            ..Default::default()
        };
        let response = RangeResponse {
            header: Some(ResponseHeader { revision: 9, ..Default::default() }),
            kvs: (0..300).map(kv).collect(),
            more: true,
            count: 12345,
        };
        let pieces = encode(response.clone());
        assert!(pieces.len() > 3 && pieces.iter().filter(|piece| piece.len() > PIECE_BYTES).count() == 1);
        assert_eq!(pieces.iter().map(Bytes::len).sum::<usize>(), response.encoded_len());
        assert_eq!(decode(&pieces).unwrap(), response);
        assert_eq!(encode(RangeResponse::default()), Vec::<Bytes>::new());
    }
}
