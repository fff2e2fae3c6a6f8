//! A key with what the store knows of it, borrowed: what scans hand to their visitors, so that a count, a filter
//! or a compare over many keys copies none of them. Promises nothing about how long the bytes stand beyond its
//! lifetime; knows nothing of where they stand (a page of the tree, an overlay, a message).

use super::KeyValue;
use bytes::Bytes;

/// The borrowed twin of [`KeyValue`], field by field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvRef<'a> {
    pub key: &'a [u8],
    pub value: &'a [u8],
    pub create_revision: i64,
    pub mod_revision: i64,
    pub version: i64,
    pub lease: i64,
}

impl KvRef<'_> {
    /// Copies key and value.
    pub fn to_owned(&self) -> KeyValue {
        KeyValue { value: Bytes::copy_from_slice(self.value), ..self.without_value() }
    }

    /// Copies all but the value, which is left empty.
    pub fn without_value(&self) -> KeyValue {
        KeyValue {
            key: Bytes::copy_from_slice(self.key),
            create_revision: self.create_revision,
            mod_revision: self.mod_revision,
            version: self.version,
            value: Bytes::new(),
            lease: self.lease,
        }
    }
}

impl<'a> From<&'a KeyValue> for KvRef<'a> {
    fn from(kv: &'a KeyValue) -> Self {
        KvRef {
            key: &kv.key,
            value: &kv.value,
            create_revision: kv.create_revision,
            mod_revision: kv.mod_revision,
            version: kv.version,
            lease: kv.lease,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn borrowing_and_owning_again_keeps_every_field() {
        let kv = KeyValue {
            key: Bytes::from_static(b"k\0\xff"),
            create_revision: 2,
            mod_revision: 9,
            version: 4,
            value: Bytes::from_static(b"v"),
            lease: -5,
        };
        assert_eq!(KvRef::from(&kv).to_owned(), kv);
        assert_eq!(KvRef::from(&kv).without_value(), KeyValue { value: Bytes::new(), ..kv });
    }
}
