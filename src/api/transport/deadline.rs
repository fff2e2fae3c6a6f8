//! The deadline that a caller sets with `grpc-timeout`: a call that has not answered by then ends with a status and
//! is dropped where it waits.

use std::future::Future;
use std::pin::{Pin, pin};
use std::task::Poll;
use std::time::Duration;

use http::HeaderMap;
use tonic::Status;
use tonic::body::Body;

use crate::runtime::executor::{Sleep, sleep};

/// The timer of a call that says how long it may take.
pub(super) fn timer(headers: &HeaderMap) -> Option<Sleep> {
    headers.get("grpc-timeout").and_then(|value| timeout(value.as_bytes())).map(sleep)
}

/// At most eight digits and a unit. What is neither is no deadline.
fn timeout(value: &[u8]) -> Option<Duration> {
    let (unit, digits) = value.split_last()?;
    if digits.is_empty() || digits.len() > 8 {
        return None;
    }
    let mut amount = 0;
    for digit in digits {
        amount = amount * 10 + u64::from(char::from(*digit).to_digit(10)?);
    }
    match unit {
        b'H' => Some(Duration::from_secs(amount * 3600)),
        b'M' => Some(Duration::from_secs(amount * 60)),
        b'S' => Some(Duration::from_secs(amount)),
        b'm' => Some(Duration::from_millis(amount)),
        b'u' => Some(Duration::from_micros(amount)),
        b'n' => Some(Duration::from_nanos(amount)),
        _ => None,
    }
}

/// The call's answer, or that its time is up; then the call is dropped where it waits.
pub(super) async fn within(
    deadline: &mut Option<Sleep>,
    call: impl Future<Output = http::Response<Body>>,
) -> http::Response<Body> {
    let mut call = pin!(call);
    std::future::poll_fn(|context| {
        if let Poll::Ready(response) = call.as_mut().poll(context) {
            return Poll::Ready(response);
        }
        match deadline {
            Some(deadline) => Pin::new(deadline).poll(context).map(|()| exceeded().into_http()),
            None => Poll::Pending,
        }
    })
    .await
}

/// What Go's context says.
pub(super) fn exceeded() -> Status {
    Status::deadline_exceeded("context deadline exceeded")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timeout_is_digits_and_a_unit() {
        assert_eq!(timeout(b"5S"), Some(Duration::from_secs(5)));
        assert_eq!(timeout(b"99999999H"), Some(Duration::from_secs(99_999_999 * 3600)));
        assert_eq!(timeout(b"150m"), Some(Duration::from_millis(150)));
        assert_eq!(timeout(b"7u"), Some(Duration::from_micros(7)));
        assert_eq!(timeout(b"0n"), Some(Duration::ZERO));
        assert_eq!(timeout(b"1M"), Some(Duration::from_secs(60)));
        for bad in [&b""[..], b"S", b"5", b"5s", b"-5S", b"123456789S", b"1.5S", "٣S".as_bytes()] {
            assert_eq!(timeout(bad), None, "{bad:?}");
        }
    }
}
