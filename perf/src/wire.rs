//! gRPC messages of etcd's KV service, written and read by hand: a request is a few copies into a
//! buffer, and of an answer only the fields are read that a load needs.

/// The methods that a load calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Method {
    Range,
    RangeStream,
    Put,
    DeleteRange,
    Txn,
}

impl Method {
    pub const ALL: [Self; 5] = [Self::Range, Self::RangeStream, Self::Put, Self::DeleteRange, Self::Txn];

    pub fn path(self) -> &'static str {
        match self {
            Self::Range => "/etcdserverpb.KV/Range",
            Self::RangeStream => "/etcdserverpb.KV/RangeStream",
            Self::Put => "/etcdserverpb.KV/Put",
            Self::DeleteRange => "/etcdserverpb.KV/DeleteRange",
            Self::Txn => "/etcdserverpb.KV/Txn",
        }
    }
}

/// Wraps what `body` writes into gRPC's five bytes: not compressed, length.
pub fn message(out: &mut Vec<u8>, body: impl FnOnce(&mut Vec<u8>)) {
    let start = out.len();
    out.extend_from_slice(&[0; 5]);
    body(out);
    let length = (out.len() - start - 5) as u32;
    out[start + 1..start + 5].copy_from_slice(&length.to_be_bytes());
}

pub fn varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// Field `number` with the bytes `value`.
pub fn bytes(out: &mut Vec<u8>, number: u8, value: &[u8]) {
    out.push(number << 3 | 2);
    varint(out, value.len() as u64);
    out.extend_from_slice(value);
}

/// Field `number` with the integer, enum or bool `value`; nothing for zero.
pub fn number(out: &mut Vec<u8>, number: u8, value: u64) {
    if value != 0 {
        out.push(number << 3);
        varint(out, value);
    }
}

/// Field `number` with a message of at most a few KiB.
pub fn nested(out: &mut Vec<u8>, number: u8, body: impl FnOnce(&mut Vec<u8>)) {
    out.push(number << 3 | 2);
    let start = out.len();
    // Room for the length that nearly every message here has; it is moved where the guess was wrong.
    out.extend_from_slice(&[0; 2]);
    body(out);
    let length = out.len() - start - 2;
    if (0x80..0x4000).contains(&length) {
        out[start] = length as u8 | 0x80;
        out[start + 1] = (length >> 7) as u8;
    } else {
        let mut coded = Vec::new();
        varint(&mut coded, length as u64);
        out.splice(start..start + 2, coded);
    }
}

pub fn put(out: &mut Vec<u8>, key: &[u8], value: &[u8]) {
    bytes(out, 1, key);
    bytes(out, 2, value);
}

/// A range of one key (`end` empty) or of `[key, end)`.
pub fn range(out: &mut Vec<u8>, key: &[u8], end: &[u8], serializable: bool) {
    bytes(out, 1, key);
    if !end.is_empty() {
        bytes(out, 2, end);
    }
    number(out, 7, u64::from(serializable));
}

pub fn delete_range(out: &mut Vec<u8>, key: &[u8], end: &[u8]) {
    bytes(out, 1, key);
    bytes(out, 2, end);
}

/// A transaction that puts without a condition, for loading many keys.
pub fn txn_put(out: &mut Vec<u8>, key: &[u8], value: &[u8]) {
    nested(out, 2, |out| nested(out, 2, |out| put(out, key, value)));
}

/// The update of Kubernetes' storage layer: if the key is still at `mod_revision`, put; otherwise read it.
pub fn guarded_update(out: &mut Vec<u8>, key: &[u8], mod_revision: i64, value: &[u8]) {
    nested(out, 1, |out| {
        number(out, 2, 2);
        bytes(out, 3, key);
        // A member of a oneof is written even where it is zero.
        out.push(6 << 3);
        varint(out, mod_revision as u64);
    });
    txn_put(out, key, value);
    nested(out, 3, |out| nested(out, 1, |out| range(out, key, &[], false)));
}

/// The fields of an encoded message: number and value.
pub struct Fields<'a>(pub &'a [u8]);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Value<'a> {
    Number(u64),
    Bytes(&'a [u8]),
}

impl<'a> Iterator for Fields<'a> {
    type Item = (u64, Value<'a>);

    /// Ends at the first thing that is not protobuf.
    fn next(&mut self) -> Option<Self::Item> {
        let key = self.varint()?;
        let value = match key & 7 {
            0 => Value::Number(self.varint()?),
            2 => {
                let length = usize::try_from(self.varint()?).ok()?;
                let (value, rest) = self.0.split_at_checked(length)?;
                self.0 = rest;
                Value::Bytes(value)
            }
            _ => return None,
        };
        Some((key >> 3, value))
    }
}

impl Fields<'_> {
    fn varint(&mut self) -> Option<u64> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let (&byte, rest) = self.0.split_first()?;
            self.0 = rest;
            value |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Some(value);
            }
        }
        None
    }
}

/// The message in field `number`.
pub fn message_in(message: &[u8], number: u64) -> Option<&[u8]> {
    Fields(message).find_map(|field| match field {
        (at, Value::Bytes(value)) if at == number => Some(value),
        _ => None,
    })
}

/// The integer in field `number`, zero where it is missing.
pub fn number_in(message: &[u8], number: u64) -> u64 {
    Fields(message)
        .find_map(|field| match field {
            (at, Value::Number(value)) if at == number => Some(value),
            _ => None,
        })
        .unwrap_or(0)
}

/// The revision in the header of any answer.
pub fn header_revision(answer: &[u8]) -> i64 {
    message_in(answer, 1).map_or(0, |header| number_in(header, 3) as i64)
}

/// The outcome of a `guarded_update`: the revision of the key now, and whether the put was done.
pub fn guarded_outcome(answer: &[u8]) -> (i64, bool) {
    if number_in(answer, 2) == 1 {
        return (header_revision(answer), true);
    }
    let range = message_in(answer, 3).and_then(|operation| message_in(operation, 1));
    (range.map_or(0, range_mod_revision), false)
}

/// The `mod_revision` of the first key in the answer to a range, zero where it is empty.
pub fn range_mod_revision(range: &[u8]) -> i64 {
    message_in(range, 2).map_or(0, |key_value| number_in(key_value, 3)) as i64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nested_lengths_of_one_two_and_three_bytes() {
        for length in [0, 1, 0x7f, 0x80, 0x3fff, 0x4000, 70_000] {
            let mut out = Vec::new();
            nested(&mut out, 3, |out| out.resize(out.len() + length, 7));
            let fields: Vec<_> = Fields(&out).collect();
            assert_eq!(fields, [(3, Value::Bytes(&vec![7; length]))], "{length}");
        }
    }

    #[test]
    fn the_outcome_of_a_guarded_update() {
        let mut won = Vec::new();
        nested(&mut won, 1, |out| number(out, 3, 300));
        number(&mut won, 2, 1);
        assert_eq!(guarded_outcome(&won), (300, true));
        let mut lost = Vec::new();
        nested(&mut lost, 1, |out| number(out, 3, 301));
        nested(&mut lost, 3, |out| {
            nested(out, 1, |out| nested(out, 2, |out| number(out, 3, 299)));
        });
        assert_eq!(guarded_outcome(&lost), (299, false));
    }
}
