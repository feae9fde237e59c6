//! A TCP proxy before a store, which can be told to fail in the ways that networks do.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context as _, Result};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// What happens to connections and bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    /// All goes through.
    Pass,
    /// New connections are reset at once; the ones that exist go on (see [`Proxy::cut`]).
    Refuse,
    /// Connections are accepted and kept, no byte moves; on the way back to `Pass` all bytes arrive.
    Stall,
    /// Connections are accepted and kept, bytes vanish. A connection that lost bytes stays lost.
    Blackhole,
}

/// Where bytes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    ToServer,
    ToClient,
}

/// In the message that sends a batch, which is a transaction by itself: each parameter in its binary form, and so many of them.
pub(crate) const BATCH: &[u8] = &[0, 1, 0, 1, 0, 26];
/// In what the server says once that is committed: a row of eight columns, of which the first is a generation.
pub(crate) const BATCH_DONE: &[u8] = &[0, 8, 0, 0, 0, 6];

/// How often one stands in the other.
pub(crate) fn count_of(part: &[u8], bytes: &[u8]) -> usize {
    bytes.windows(part.len()).filter(|window| *window == part).count()
}

/// What a hook wants to be done with the bytes that it saw.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    Forward,
    /// Forward after a while.
    Delay(Duration),
    /// Reset the connection instead.
    Cut,
    /// Forward, then reset the connection.
    ForwardThenCut,
}

/// Sees each piece of bytes as it was read, which need not be a whole message.
pub(crate) type Hook = Box<dyn Fn(Direction, &[u8]) -> Verdict + Send + Sync>;

/// The proxy. It runs on a thread of its own, so that a test that blocks does not block it too.
#[derive(Debug)]
pub(crate) struct Proxy {
    address: SocketAddr,
    mode: watch::Sender<Mode>,
    cuts: watch::Sender<u64>,
    accepted: Arc<AtomicUsize>,
    /// Dropped to end the thread.
    running: Option<watch::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Clone)]
struct Shared {
    server: SocketAddr,
    mode: watch::Receiver<Mode>,
    cuts: watch::Receiver<u64>,
    hook: Arc<Hook>,
}

impl Proxy {
    pub(crate) fn start(server: SocketAddr) -> Result<Self> {
        Self::start_with(server, Box::new(|_, _| Verdict::Forward))
    }

    pub(crate) fn start_with(server: SocketAddr, hook: Hook) -> Result<Self> {
        let listener = std::net::TcpListener::bind("127.0.0.1:0")?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let (mode, mode_seen) = watch::channel(Mode::Pass);
        let (cuts, cuts_seen) = watch::channel(0);
        let (running, ended) = watch::channel(());
        let accepted = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&accepted);
        let shared = Shared { server, mode: mode_seen, cuts: cuts_seen, hook: Arc::new(hook) };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let thread = std::thread::Builder::new().name("proxy".into()).spawn(move || {
            runtime.block_on(accept(listener, &shared, &count, ended));
        })?;
        Ok(Self { address, mode, cuts, accepted, running: Some(running), thread: Some(thread) })
    }

    /// Where it listens.
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    pub(crate) fn set(&self, mode: Mode) {
        self.mode.send_replace(mode);
    }

    /// Resets all connections that exist; new ones get through as the mode says.
    pub(crate) fn cut(&self) {
        self.cuts.send_modify(|count| *count += 1);
    }

    /// How many connections were accepted so far, refused ones included.
    pub(crate) fn accepted(&self) -> usize {
        self.accepted.load(Ordering::SeqCst)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        drop(self.running.take());
        if let Some(thread) = self.thread.take() {
            thread.join().ok();
        }
    }
}

async fn accept(
    listener: std::net::TcpListener,
    shared: &Shared,
    count: &AtomicUsize,
    mut ended: watch::Receiver<()>,
) {
    let Ok(listener) = TcpListener::from_std(listener) else { return };
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = ended.changed() => return,
        };
        if let Ok((client, _)) = accepted {
            count.fetch_add(1, Ordering::SeqCst);
            tokio::spawn(serve(client, shared.clone()));
        }
    }
}

/// One connection to its end. An error on either side is the end of it, as it is for the other side.
async fn serve(mut client: TcpStream, mut shared: Shared) {
    // Cuts of before this connection are not its own.
    shared.cuts.mark_unchanged();
    let mut cuts = shared.cuts.clone();
    let reset = tokio::select! {
        ended = relay(&mut client, &mut shared) => ended.is_err(),
        _ = cuts.changed() => true,
    };
    if reset {
        reset_on_close(&client);
    }
}

async fn relay(client: &mut TcpStream, shared: &mut Shared) -> Result<()> {
    if *shared.mode.borrow() == Mode::Refuse {
        anyhow::bail!("refused");
    }
    shared.mode.wait_for(|mode| *mode != Mode::Stall).await?;
    if *shared.mode.borrow() == Mode::Blackhole {
        return swallow(client).await;
    }
    let mut server = TcpStream::connect(shared.server).await?;
    // However this ends (a cut drops it in the middle), the server sees the reset too.
    reset_on_close(&server);
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    let (client_reads, client_writes) = client.split();
    let (server_reads, server_writes) = server.split();
    tokio::try_join!(
        pump(client_reads, server_writes, Direction::ToServer, shared.clone()),
        pump(server_reads, client_writes, Direction::ToClient, shared.clone()),
    )?;
    Ok(())
}

async fn pump(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    direction: Direction,
    mut shared: Shared,
) -> Result<()> {
    let mut buffer = vec![0; 1 << 16];
    loop {
        let length = from.read(&mut buffer).await?;
        let bytes = buffer.get(..length).context("a read within its buffer")?;
        let mode = *shared.mode.wait_for(|mode| *mode != Mode::Stall).await?;
        if mode == Mode::Blackhole {
            return swallow(&mut from).await;
        }
        if bytes.is_empty() {
            return Ok(to.shutdown().await?);
        }
        let verdict = (shared.hook)(direction, bytes);
        match verdict {
            Verdict::Forward | Verdict::ForwardThenCut => {}
            Verdict::Delay(time) => tokio::time::sleep(time).await,
            Verdict::Cut => anyhow::bail!("cut by the hook"),
        }
        to.write_all(bytes).await?;
        if verdict == Verdict::ForwardThenCut {
            anyhow::bail!("cut by the hook");
        }
    }
}

/// Reads and forgets until a cut ends it; even the end of the stream is not passed on.
async fn swallow(from: &mut (impl AsyncRead + Unpin)) -> Result<()> {
    tokio::io::copy(from, &mut tokio::io::sink()).await?;
    std::future::pending().await
}

fn reset_on_close(stream: &TcpStream) {
    socket2::SockRef::from(stream).set_linger(Some(Duration::ZERO)).ok();
}

#[cfg(test)]
mod tests {
    use super::super::client::Raw;
    use super::*;

    const QUIET: Duration = Duration::from_millis(100);

    /// A server that sends back what it gets.
    async fn echo() -> Result<SocketAddr> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                tokio::spawn(async move {
                    let (mut reads, mut writes) = stream.split();
                    tokio::io::copy(&mut reads, &mut writes).await.ok();
                });
            }
        });
        Ok(address)
    }

    async fn echoes(connection: &mut Raw) -> Result<bool> {
        connection.write(b"hello").await?;
        Ok(connection.read().await? == b"hello")
    }

    /// The reset may come before the client knows that it is connected, or after.
    async fn is_reset(proxy: &Proxy) -> bool {
        match Raw::connect(proxy.address()).await {
            Ok(mut connection) => connection.read().await.is_err(),
            Err(_) => true,
        }
    }

    async fn is_silent(connection: &mut Raw) -> bool {
        tokio::time::timeout(QUIET, connection.read()).await.is_err()
    }

    #[tokio::test]
    async fn bytes_and_the_end_of_the_stream_pass() -> Result<()> {
        let proxy = Proxy::start(echo().await?)?;
        let mut connection = Raw::connect(proxy.address()).await?;
        assert!(echoes(&mut connection).await?);
        connection.finish().await?;
        assert_eq!(connection.read_to_end().await?, b"");
        assert_eq!(proxy.accepted(), 1);
        Ok(())
    }

    #[tokio::test]
    async fn refuse_is_for_new_connections_and_cut_for_old_ones() -> Result<()> {
        let proxy = Proxy::start(echo().await?)?;
        let mut old = Raw::connect(proxy.address()).await?;
        assert!(echoes(&mut old).await?);
        proxy.set(Mode::Refuse);
        assert!(is_reset(&proxy).await);
        assert!(echoes(&mut old).await?);
        proxy.cut();
        assert!(old.read().await.is_err());
        proxy.set(Mode::Pass);
        let mut again = Raw::connect(proxy.address()).await?;
        assert!(echoes(&mut again).await?);
        Ok(())
    }

    #[tokio::test]
    async fn a_stall_holds_bytes_and_gives_them_back() -> Result<()> {
        let proxy = Proxy::start(echo().await?)?;
        let mut old = Raw::connect(proxy.address()).await?;
        assert!(echoes(&mut old).await?);
        proxy.set(Mode::Stall);
        let mut new = Raw::connect(proxy.address()).await?;
        old.write(b"old").await?;
        new.write(b"new").await?;
        assert!(is_silent(&mut old).await && is_silent(&mut new).await);
        proxy.set(Mode::Pass);
        assert_eq!(old.read().await?, b"old");
        assert_eq!(new.read().await?, b"new");
        Ok(())
    }

    #[tokio::test]
    async fn what_a_blackhole_took_stays_lost() -> Result<()> {
        let proxy = Proxy::start(echo().await?)?;
        let mut old = Raw::connect(proxy.address()).await?;
        assert!(echoes(&mut old).await?);
        proxy.set(Mode::Blackhole);
        let mut new = Raw::connect(proxy.address()).await?;
        old.write(b"old").await?;
        new.write(b"new").await?;
        assert!(is_silent(&mut old).await && is_silent(&mut new).await);
        proxy.set(Mode::Pass);
        assert!(is_silent(&mut old).await && is_silent(&mut new).await);
        proxy.cut();
        assert!(old.read().await.is_err() && new.read().await.is_err());
        Ok(())
    }

    #[tokio::test]
    async fn a_hook_sees_bytes_and_decides() -> Result<()> {
        let hook: Hook = Box::new(|direction, bytes| match (direction, bytes) {
            (Direction::ToServer, b"cut") => Verdict::Cut,
            (Direction::ToServer, b"slow") => Verdict::Delay(QUIET * 2),
            (Direction::ToClient, b"last") => Verdict::ForwardThenCut,
            _ => Verdict::Forward,
        });
        let proxy = Proxy::start_with(echo().await?, hook)?;
        let mut connection = Raw::connect(proxy.address()).await?;
        assert!(echoes(&mut connection).await?);
        connection.write(b"slow").await?;
        assert!(is_silent(&mut connection).await);
        assert_eq!(connection.read().await?, b"slow");
        connection.write(b"cut").await?;
        assert!(connection.read().await.is_err());

        let mut connection = Raw::connect(proxy.address()).await?;
        connection.write(b"last").await?;
        // The reset may overtake the bytes that it follows.
        if let Ok(bytes) = connection.read().await {
            assert_eq!(bytes, b"last");
            assert!(connection.read().await.is_err());
        }
        Ok(())
    }

    #[tokio::test]
    async fn without_a_server_connections_are_reset() -> Result<()> {
        let nobody = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?;
        let proxy = Proxy::start(nobody)?;
        assert!(is_reset(&proxy).await);
        Ok(())
    }
}
