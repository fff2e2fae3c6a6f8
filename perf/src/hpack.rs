//! The little of HPACK (RFC 7541) that a load generator needs.
//!
//! `RequestHeaders` writes the header blocks of requests as real gRPC clients do: everything goes into
//! the server's dynamic table once and is a byte per field from then on. `Decoder` follows the server's
//! table and finds the gRPC status, since an answer that consists of trailers only is a failure that
//! looks like a fast success. It does not know field values outside printable ASCII.

use std::collections::VecDeque;

use crate::wire::Method;

/// What RFC 7541 calls the default; neither side of a gRPC connection changes it in practice.
pub const TABLE_BYTES: usize = 4096;

const STATIC: [(&str, &str); 61] = [
    (":authority", ""),
    (":method", "GET"),
    (":method", "POST"),
    (":path", "/"),
    (":path", "/index.html"),
    (":scheme", "http"),
    (":scheme", "https"),
    (":status", "200"),
    (":status", "204"),
    (":status", "206"),
    (":status", "304"),
    (":status", "400"),
    (":status", "404"),
    (":status", "500"),
    ("accept-charset", ""),
    ("accept-encoding", "gzip, deflate"),
    ("accept-language", ""),
    ("accept-ranges", ""),
    ("accept", ""),
    ("access-control-allow-origin", ""),
    ("age", ""),
    ("allow", ""),
    ("authorization", ""),
    ("cache-control", ""),
    ("content-disposition", ""),
    ("content-encoding", ""),
    ("content-language", ""),
    ("content-length", ""),
    ("content-location", ""),
    ("content-range", ""),
    ("content-type", ""),
    ("cookie", ""),
    ("date", ""),
    ("etag", ""),
    ("expect", ""),
    ("expires", ""),
    ("from", ""),
    ("host", ""),
    ("if-match", ""),
    ("if-modified-since", ""),
    ("if-none-match", ""),
    ("if-range", ""),
    ("if-unmodified-since", ""),
    ("last-modified", ""),
    ("link", ""),
    ("location", ""),
    ("max-forwards", ""),
    ("proxy-authenticate", ""),
    ("proxy-authorization", ""),
    ("range", ""),
    ("referer", ""),
    ("refresh", ""),
    ("retry-after", ""),
    ("server", ""),
    ("set-cookie", ""),
    ("strict-transport-security", ""),
    ("transfer-encoding", ""),
    ("user-agent", ""),
    ("vary", ""),
    ("via", ""),
    ("www-authenticate", ""),
];

/// The symbols of the Huffman code by length, in code order. The code is canonical, so this is all of it
/// up to 15 bits; every longer code stands for a byte that no header of a gRPC server holds.
const HUFFMAN: [(u32, &[u8]); 10] = [
    (5, b"012aceiost"),
    (6, b" %-./3456789=A_bdfghlmnpru"),
    (7, b":BCDEFGHIJKLMNOPQRSTUVWYjkqvwxyz"),
    (8, b"&*,;XZ"),
    (10, b"!\"()?"),
    (11, b"'+|"),
    (12, b"#>"),
    (13, b"\0$@[]~"),
    (14, b"^}"),
    (15, b"<`{"),
];

fn huffman(coded: &[u8]) -> Option<Vec<u8>> {
    let mut text = Vec::with_capacity(coded.len() * 2);
    let (mut code, mut length) = (0u32, 0u32);
    for bit in coded.iter().flat_map(|byte| (0..8).rev().map(move |at| u32::from(byte >> at & 1))) {
        code = code << 1 | bit;
        length += 1;
        let mut first = 0u32;
        let mut previous = 0u32;
        for (bits, symbols) in HUFFMAN {
            first <<= bits - previous;
            previous = bits;
            if bits == length && code >= first && ((code - first) as usize) < symbols.len() {
                text.push(symbols[(code - first) as usize]);
                (code, length) = (0, 0);
                break;
            }
            first += symbols.len() as u32;
        }
        if length > 15 {
            return None;
        }
    }
    // The padding is the beginning of a code of ones only.
    (length < 8 && code == (1 << length) - 1).then_some(text)
}

/// What the header blocks of one answer said.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Fields {
    pub grpc_status: Option<u32>,
    pub grpc_message: Option<String>,
    /// The `:status` of HTTP, where the block has one.
    pub http_status: Option<u32>,
}

/// The server's side of the header compression of one connection.
pub struct Decoder {
    entries: VecDeque<(Vec<u8>, Vec<u8>)>,
    bytes: usize,
    bytes_max: usize,
    /// Counts changes of the table.
    generation: u64,
    /// The blocks that were met last: between two changes of the table equal bytes mean equal fields.
    recent: Vec<(u64, Vec<u8>, Fields)>,
}

impl Decoder {
    pub fn new() -> Self {
        Self { entries: VecDeque::new(), bytes: 0, bytes_max: TABLE_BYTES, generation: 0, recent: Vec::new() }
    }

    /// Reads one complete header block; `None` means that it cannot be understood and the connection is lost.
    pub fn block(&mut self, block: &[u8]) -> Option<&Fields> {
        let generation = self.generation;
        let known = self.recent.iter().position(|(at, bytes, _)| *at == generation && bytes == block);
        let place = match known {
            Some(place) => place,
            None => {
                let fields = self.fields(block)?;
                // A block that changes the table means something else when it comes again.
                let generation = if self.generation == generation { generation } else { u64::MAX };
                if self.recent.len() == 8 {
                    self.recent.remove(0);
                }
                self.recent.push((generation, block.to_vec(), fields));
                self.recent.len() - 1
            }
        };
        Some(&self.recent[place].2)
    }

    fn fields(&mut self, mut block: &[u8]) -> Option<Fields> {
        let mut fields = Fields::default();
        while let Some(&first) = block.first() {
            if first & 0x80 != 0 {
                let index = integer(&mut block, 7)?;
                let (name, value) = self.entry(index)?;
                fields.take(&name, &value);
            } else if first & 0xe0 == 0x20 {
                self.bytes_max = integer(&mut block, 5)?;
                self.evict(0);
            } else {
                let keep = first & 0x40 != 0;
                let index = integer(&mut block, if keep { 6 } else { 4 })?;
                let name = if index == 0 { string(&mut block)? } else { self.entry(index)?.0 };
                let value = string(&mut block)?;
                fields.take(&name, &value);
                if keep {
                    self.insert(name, value);
                }
            }
        }
        Some(fields)
    }

    fn entry(&self, index: usize) -> Option<(Vec<u8>, Vec<u8>)> {
        let index = index.checked_sub(1)?;
        match STATIC.get(index) {
            Some((name, value)) => Some((name.as_bytes().to_vec(), value.as_bytes().to_vec())),
            None => self.entries.get(index - STATIC.len()).cloned(),
        }
    }

    fn insert(&mut self, name: Vec<u8>, value: Vec<u8>) {
        let size = name.len() + value.len() + 32;
        self.evict(size);
        if size <= self.bytes_max {
            self.bytes += size;
            self.entries.push_front((name, value));
        }
    }

    fn evict(&mut self, room: usize) {
        self.generation += 1;
        while self.bytes + room > self.bytes_max {
            let Some((name, value)) = self.entries.pop_back() else { break };
            self.bytes -= name.len() + value.len() + 32;
        }
    }
}

impl Fields {
    fn take(&mut self, name: &[u8], value: &[u8]) {
        let number = || std::str::from_utf8(value).ok()?.parse().ok();
        match name {
            b":status" => self.http_status = number(),
            b"grpc-status" => self.grpc_status = number(),
            b"grpc-message" => self.grpc_message = Some(String::from_utf8_lossy(value).into_owned()),
            _ => {}
        }
    }
}

fn integer(block: &mut &[u8], bits: u32) -> Option<usize> {
    let mask = (1usize << bits) - 1;
    let (&first, mut rest) = block.split_first()?;
    let mut value = usize::from(first) & mask;
    if value == mask {
        for shift in (0..28).step_by(7) {
            let (&byte, after) = rest.split_first()?;
            rest = after;
            value += usize::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                *block = rest;
                return Some(value);
            }
        }
        return None;
    }
    *block = rest;
    Some(value)
}

fn string(block: &mut &[u8]) -> Option<Vec<u8>> {
    let coded = block.first()? & 0x80 != 0;
    let length = integer(block, 7)?;
    let (text, rest) = block.split_at_checked(length)?;
    *block = rest;
    if coded { huffman(text) } else { Some(text.to_vec()) }
}

/// The header blocks of one connection's requests.
pub struct RequestHeaders {
    authority: String,
    /// How many entries the server's table holds by now, and the ordinal of each path among them.
    inserted: u32,
    paths: [Option<u32>; Method::ALL.len()],
    blocks: [Vec<u8>; Method::ALL.len()],
}

impl RequestHeaders {
    pub fn new(authority: String) -> Self {
        Self { authority, inserted: 0, paths: Default::default(), blocks: Default::default() }
    }

    /// The block of the next request on this connection, to be sent in the order of the calls.
    pub fn block(&mut self, method: Method, out: &mut Vec<u8>) {
        let at = method as usize;
        if !self.blocks[at].is_empty() {
            out.extend_from_slice(&self.blocks[at]);
            return;
        }
        out.extend_from_slice(&POST_HTTP);
        let first = self.inserted == 0;
        if first {
            literal(0x40 | 1, None, &self.authority, out);
            self.inserted = 1;
        } else {
            out.push(self.index(AUTHORITY));
        }
        // Pseudo-headers stand before all others.
        literal(0x40 | 4, None, method.path(), out);
        self.paths[at] = Some(self.inserted);
        self.inserted += 1;
        if first {
            literal(0x40 | 31, None, "application/grpc", out);
            literal(0x40 | 58, None, "etcore-perf/1", out);
            literal(0x40, Some("te"), "trailers", out);
            self.inserted += OTHERS.len() as u32;
        } else {
            out.extend(OTHERS.map(|ordinal| self.index(ordinal)));
        }
        // Every index has moved.
        for method in Method::ALL {
            if let Some(path) = self.paths[method as usize] {
                let indexes =
                    [AUTHORITY, path, OTHERS[0], OTHERS[1], OTHERS[2]].map(|ordinal| self.index(ordinal));
                self.blocks[method as usize] = [&POST_HTTP[..], &indexes[..]].concat();
            }
        }
    }

    /// The byte that names the entry which was inserted as the `ordinal`-th.
    fn index(&self, ordinal: u32) -> u8 {
        0x80 | (STATIC.len() as u32 + self.inserted - ordinal) as u8
    }
}

/// `:method: POST` and `:scheme: http` of the static table.
const POST_HTTP: [u8; 2] = [0x83, 0x86];
/// Ordinals of what the first request inserts besides its path, which is the second: authority, then
/// content type, user agent and te.
const AUTHORITY: u32 = 0;
const OTHERS: [u32; 3] = [2, 3, 4];

/// A literal field; names and values here are far below the 127 bytes that one length byte can say.
fn literal(first: u8, name: Option<&str>, value: &str, out: &mut Vec<u8>) {
    out.push(first);
    for text in name.into_iter().chain([value]) {
        assert!(text.len() < 127, "a header of 127 bytes or more needs a longer length");
        out.push(text.len() as u8);
        out.extend_from_slice(text.as_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(hex: &str) -> Vec<u8> {
        let digits: Vec<u8> = hex.bytes().filter(u8::is_ascii_hexdigit).collect();
        digits
            .chunks(2)
            .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap())
            .collect()
    }

    #[test]
    fn huffman_reads_the_examples_of_rfc_7541() {
        for (coded, text) in [
            ("f1e3 c2e5 f23a 6ba0 ab90 f4ff", "www.example.com"),
            ("a8eb 1064 9cbf", "no-cache"),
            ("d07a be94 1054 d444 a820 0595 040b 8166 e082 a62d 1bff", "Mon, 21 Oct 2013 20:13:21 GMT"),
            (
                "94e7 821d d7f2 e6c7 b335 dfdf cd5b 3960 d5af 2708 7f36 72c1 ab27 0fb5 291f 9587 3160 65c0 03ed 4ee5 b106 3d50 07",
                "foo=ASDJKHQKBZXOQWEOPIUAXQWEOIU; max-age=3600; version=1",
            ),
        ] {
            assert_eq!(huffman(&bytes(coded)).as_deref(), Some(text.as_bytes()), "{text}");
        }
        assert_eq!(huffman(&[0]), None, "padding that is not ones");
    }

    #[test]
    fn the_status_is_found_as_literal_and_as_index_after_the_table_moved() {
        let mut decoder = Decoder::new();
        let mut trailers = Vec::new();
        literal(0x40, Some("grpc-status"), "0", &mut trailers);
        assert_eq!(decoder.block(&trailers).unwrap().grpc_status, Some(0));
        assert_eq!(decoder.block(&[0xbe]).unwrap().grpc_status, Some(0));
        let mut failure = Vec::new();
        literal(0x40, Some("grpc-status"), "14", &mut failure);
        assert_eq!(decoder.block(&failure).unwrap().grpc_status, Some(14));
        assert_eq!(decoder.block(&[0xbe]).unwrap().grpc_status, Some(14));
        assert_eq!(decoder.block(&[0xbf]).unwrap().grpc_status, Some(0));
        assert_eq!(decoder.block(&[0xc0]), None, "an index beyond the table");
    }

    #[test]
    fn a_block_that_inserts_is_not_taken_from_memory() {
        let mut decoder = Decoder::new();
        let mut trailers = Vec::new();
        literal(0x40, Some("grpc-status"), "7", &mut trailers);
        for _ in 0..3 {
            assert_eq!(decoder.block(&trailers).unwrap().grpc_status, Some(7));
        }
        assert_eq!(decoder.entries.len(), 3);
    }

    #[test]
    fn request_blocks_mean_what_they_say_to_a_decoder() {
        let mut headers = RequestHeaders::new("127.0.0.1:2379".into());
        let mut decoder = Decoder::new();
        let order = [Method::Put, Method::Range, Method::Put, Method::Txn, Method::Range, Method::Put];
        for (at, method) in order.into_iter().enumerate() {
            let mut block = Vec::new();
            headers.block(method, &mut block);
            assert!(at <= 3 || block.len() == 7, "everything is in the table");
            let mut rest = block.as_slice();
            let mut fields = Vec::new();
            while let Some(&first) = rest.first() {
                if first & 0x80 != 0 {
                    let index = integer(&mut rest, 7).unwrap();
                    fields.push(decoder.entry(index).unwrap());
                } else {
                    let index = integer(&mut rest, 6).unwrap();
                    let name =
                        if index == 0 { string(&mut rest).unwrap() } else { decoder.entry(index).unwrap().0 };
                    let value = string(&mut rest).unwrap();
                    fields.push((name.clone(), value.clone()));
                    decoder.insert(name, value);
                }
            }
            let text: Vec<_> = fields.iter().map(|(name, value)| [&name[..], b"=", value].concat()).collect();
            let path = format!(":path={}", method.path());
            let expected: [&[u8]; 7] = [
                b":method=POST",
                b":scheme=http",
                b":authority=127.0.0.1:2379",
                path.as_bytes(),
                b"content-type=application/grpc",
                b"user-agent=etcore-perf/1",
                b"te=trailers",
            ];
            assert_eq!(text, expected, "request {at}");
        }
    }
}
