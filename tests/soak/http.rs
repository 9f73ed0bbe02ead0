//! Connections to the server, quick ones and slow ones.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::time::Duration;

use folio_testing::http::{self, Pace, TIMEOUT};

pub type Connection = http::Connection<TcpStream>;

/// A client that reads that many bytes at a time, with a pause before each. Its kernel does not
/// read ahead either.
pub fn open_slow(port: u16, bytes: usize, pause: Duration) -> io::Result<Connection> {
    let stream = small_window(port)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.set_write_timeout(Some(TIMEOUT))?;
    stream.set_nodelay(true)?;
    Ok(Connection::over(stream, Pace { bytes, pause }))
}

/// A connection with a receive buffer of a few kilobytes. The standard library cannot request that;
/// tokio can.
fn small_window(port: u16) -> io::Result<TcpStream> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
    let stream = runtime.block_on(async {
        let socket = tokio::net::TcpSocket::new_v4()?;
        socket.set_recv_buffer_size(4 << 10)?;
        socket.connect(SocketAddr::from((Ipv4Addr::LOCALHOST, port))).await?.into_std()
    })?;
    stream.set_nonblocking(false)?;
    Ok(stream)
}
