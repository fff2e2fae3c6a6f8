//! A client that may do anything that HTTP/2 allows: calls of any bytes to any path, and connections of bare bytes.

use bytes::{BufMut, Bytes, BytesMut};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

/// A server that does not answer for so long has failed.
const PATIENCE: Duration = Duration::from_secs(30);

pub type Sender = h2::client::SendRequest<Bytes>;

/// Runs one conversation to its end; each has a connection of its own.
pub fn converse<T>(port: u16, talk: impl AsyncFnOnce(Sender) -> T) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let stream = tokio::net::TcpStream::connect(("127.0.0.1", port)).await.unwrap();
        let (sender, connection) =
            h2::client::Builder::new().max_concurrent_reset_streams(1 << 16).handshake(stream).await.unwrap();
        tokio::spawn(async move { drop(connection.await) });
        tokio::time::timeout(PATIENCE, talk(sender)).await.expect("an answer in time")
    })
}

pub fn head(path: &str) -> http::Request<()> {
    http::Request::post(format!("http://127.0.0.1{path}"))
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(())
        .unwrap()
}

/// A message as gRPC frames it.
pub fn framed(message: &[u8]) -> Bytes {
    let mut body = BytesMut::with_capacity(5 + message.len());
    body.put_u8(0);
    body.put_u32(message.len() as u32);
    body.put_slice(message);
    body.freeze()
}

/// Sends these bytes as the body of a call; returns the status and its text.
pub async fn call(sender: &Sender, path: &str, body: Bytes) -> Result<(i32, String), h2::Error> {
    let mut sender = sender.clone().ready().await?;
    let (response, mut stream) = sender.send_request(head(path), false)?;
    // The server may answer before it has read all.
    let _ = stream.send_data(body, true);
    let response = response.await?;
    let status = |headers: &http::HeaderMap| {
        let text = |name: &str| Some(headers.get(name)?.to_str().unwrap_or_default().replace("%20", " "));
        Some((text("grpc-status")?.parse().ok()?, text("grpc-message").unwrap_or_default()))
    };
    if let Some(status) = status(response.headers()) {
        return Ok(status);
    }
    let mut body = response.into_body();
    while let Some(data) = body.data().await {
        let data = data?;
        body.flow_control().release_capacity(data.len())?;
    }
    let trailers = body.trailers().await?.unwrap_or_default();
    Ok(status(&trailers).unwrap_or((-1, "no status".to_owned())))
}

/// Sends bytes on a bare connection and reads until the server closes it.
pub fn bare(port: u16, bytes: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    // The server may have closed it before it is all sent.
    let _ = stream.write_all(bytes);
    let mut answer = Vec::new();
    let mut buffer = [0; 4096];
    loop {
        match stream.read(&mut buffer) {
            Ok(0) => return answer,
            Ok(length) => answer.extend_from_slice(&buffer[..length]),
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => return answer,
            Err(error) => panic!("the connection stays open: {error}"),
        }
    }
}
