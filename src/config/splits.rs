//! The keys of `--shard-splits`: `a,m,/registry/pods/`, with Go's escapes for what cannot be typed.

use bytes::Bytes;

/// Reads a comma-separated list of keys. Each is text with escapes (`\n`, `\t`, `\\`, `\,`, `\x00`, `\377`,
/// `\u00e9`) or, after `0x`, hexadecimal digits. Keys ascend and none is empty: each begins a shard.
pub fn parse(text: &str) -> Result<Vec<Bytes>, String> {
    let mut keys: Vec<Bytes> = Vec::new();
    for item in items(text) {
        let key = match item.strip_prefix("0x") {
            Some(digits) => hexadecimal(digits),
            None => unescape(item),
        }
        .ok_or_else(|| format!("{item:?} is not a key"))?;
        if key.is_empty() {
            return Err("an empty key cannot begin a shard".into());
        }
        if keys.last().is_some_and(|last| *last >= key) {
            return Err(format!("{item:?} is not greater than the key before it"));
        }
        keys.push(key);
    }
    Ok(keys)
}

/// Cuts at commas that no backslash precedes.
fn items(text: &str) -> Vec<&str> {
    let mut items = Vec::new();
    let (mut start, mut escaped) = (0, false);
    for (at, byte) in text.bytes().enumerate() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = true,
            b',' => {
                items.push(&text[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    items.push(&text[start..]);
    items
}

fn hexadecimal(digits: &str) -> Option<Bytes> {
    let pairs = digits.as_bytes().chunks_exact(2);
    if !pairs.remainder().is_empty() {
        return None;
    }
    pairs.map(|pair| Some((hex_digit(pair[0])? << 4 | hex_digit(pair[1])?) as u8)).collect()
}

fn hex_digit(byte: u8) -> Option<u32> {
    (byte as char).to_digit(16)
}

fn unescape(item: &str) -> Option<Bytes> {
    let mut key = Vec::with_capacity(item.len());
    let mut rest = item.chars();
    while let Some(next) = rest.next() {
        let plain = if next != '\\' {
            next
        } else {
            match rest.next()? {
                'a' => '\x07',
                'b' => '\x08',
                'f' => '\x0c',
                'n' => '\n',
                'r' => '\r',
                't' => '\t',
                'v' => '\x0b',
                same @ ('\\' | '\'' | '"' | ',') => same,
                'x' => {
                    key.push(number(&mut rest, 0, 2, 16)? as u8);
                    continue;
                }
                digit @ '0'..='3' => {
                    key.push(number(&mut rest, digit.to_digit(8)?, 2, 8)? as u8);
                    continue;
                }
                'u' => char::from_u32(number(&mut rest, 0, 4, 16)?)?,
                'U' => char::from_u32(number(&mut rest, 0, 8, 16)?)?,
                _ => return None,
            }
        };
        key.extend_from_slice(plain.encode_utf8(&mut [0; 4]).as_bytes());
    }
    Some(key.into())
}

/// `start`, continued by exactly so many digits.
fn number(rest: &mut std::str::Chars, start: u32, digits: usize, base: u32) -> Option<u32> {
    (0..digits).try_fold(start, |value, _| value.checked_mul(base)?.checked_add(rest.next()?.to_digit(base)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_escapes_and_hexadecimal() {
        assert_eq!(
            parse(r"\x00\x01,0x41ff,a\,b,b\\,c\tc,/registry/pods/,é,\u00eb,\377").unwrap_err(),
            r#""/registry/pods/" is not greater than the key before it"#
        );
        let keys = parse(r"\x00\x01,/registry/pods/,0x41ff,a\,b,b\\,c\tc,\303\251,\u00eb,\377").unwrap();
        let expected: [&[u8]; 9] = [
            b"\x00\x01",
            b"/registry/pods/",
            b"A\xff",
            b"a,b",
            b"b\\",
            b"c\tc",
            "é".as_bytes(),
            "ë".as_bytes(),
            b"\xff",
        ];
        assert_eq!(keys, expected);
    }

    #[test]
    fn refusals() {
        for text in ["", "a,", "a,,b", "b,a", "a,a", r"\q", r"\x0", r"a\", "0x1", "0xzz", r"\400"] {
            assert!(parse(text).is_err(), "{text}");
        }
    }
}
