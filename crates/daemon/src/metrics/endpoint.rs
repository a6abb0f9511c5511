// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The HTTP server of the metrics page. Each client has a thread of its own, so none waits for a slow one.

use crate::inbox::Sender;
use crate::message::Message;
use cowshed_http_server::proto::request::is_local_name;
use cowshed_types::{Error, Result};
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak, mpsc};
use std::thread;
use std::time::{Duration, Instant};

/// A scraper gets this long, from its connection on, to send its request, to wait for the answer and to take it.
const PATIENCE: Duration = Duration::from_secs(5);

/// Scrapers at a time. The next one takes the place of the oldest that is silent, or else waits to be accepted.
const MAX_SCRAPERS: usize = 16;

/// Longest request that is read, in bytes.
const MAX_REQUEST_BYTES: usize = 8 << 10;

/// Starts the endpoint; returns where it is, with the port that was found free.
pub(crate) fn listen(address: &str, control: Sender<Message>) -> Result<String> {
    let failed = |error: io::Error| Error::io(&error, "could not listen").file(address.to_owned());
    let listener = TcpListener::bind(address).map_err(failed)?;
    let bound = listener.local_addr().map_err(failed)?;
    // As with an export over HTTP: a page of the web reaches what listens for this machine alone, by a name that leads here.
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host).to_owned();
    let names = if bound.ip().is_loopback() { Names::Local(vec![host]) } else { Names::Any };
    let bound = bound.to_string();
    let accept = move || accept(&listener, &control, &names);
    thread::Builder::new().name("metrics".into()).spawn(accept).map_err(failed)?;
    Ok(bound)
}

/// The names in the field `Host` of requests that are answered.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Names {
    Any,
    /// Addresses, `localhost`, the names below it, and these.
    Local(Vec<String>),
}

fn accept(listener: &TcpListener, control: &Sender<Message>, names: &Names) {
    let permits = ConnectionPermits::new(MAX_SCRAPERS);
    loop {
        let spawned = listener.accept().and_then(|(stream, _)| {
            let control = control.clone();
            let permit = permits.take(stream);
            let names = names.clone();
            let serve = move || {
                if let Err(error) = answer(&permit.scraper, (&control, &names), PATIENCE) {
                    tracing::debug!(%error, "a scraper is gone");
                }
            };
            thread::Builder::new().name("scraper".into()).spawn(serve)
        });
        if let Err(error) = spawned {
            tracing::warn!(%error, "could not accept a scraper");
            thread::sleep(Duration::from_millis(100));
        }
    }
}

/// The state of a scraper.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Phase {
    /// Its request isn't complete.
    Asking,
    /// It takes the answer.
    Taking,
    /// It waits for the daemon.
    Waiting,
    /// Its connection was cut, and its thread ends.
    Cut,
}

/// A scraper's connection.
#[derive(Debug)]
pub(super) struct Scraper {
    stream: TcpStream,
    phase: Mutex<Phase>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Scraper {
    fn new(stream: TcpStream) -> Arc<Scraper> {
        Arc::new(Scraper { stream, phase: Mutex::new(Phase::Asking) })
    }

    fn enter(&self, next: Phase) {
        let mut phase = lock(&self.phase);
        if *phase != Phase::Cut {
            *phase = next;
        }
    }

    /// Its thread ends, whatever it reads or writes.
    fn cut(&self) {
        *lock(&self.phase) = Phase::Cut;
        // Fails when the scraper was faster.
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

/// A scraper that waits for the page.
#[derive(Debug)]
struct Awaiting(Weak<Scraper>);

impl Awaiting {
    /// False once its time is up or its connection was reset.
    fn is_there(&self) -> bool {
        self.0.upgrade().is_some_and(|scraper| {
            *lock(&scraper.phase) == Phase::Waiting && matches!(scraper.stream.take_error(), Ok(None))
        })
    }
}

/// The scrapers that are served.
#[derive(Clone)]
struct ConnectionPermits {
    /// In the order of their coming.
    taken: Arc<(Mutex<Vec<Arc<Scraper>>>, Condvar)>,
    most: usize,
}

/// The right of one scraper to be served; dropping it lets the next one in.
struct ConnectionPermit {
    permits: ConnectionPermits,
    scraper: Arc<Scraper>,
}

impl ConnectionPermits {
    fn new(most: usize) -> ConnectionPermits {
        ConnectionPermits { taken: Arc::new((Mutex::new(Vec::new()), Condvar::new())), most }
    }

    fn taken(&self) -> MutexGuard<'_, Vec<Arc<Scraper>>> {
        lock(&self.taken.0)
    }

    /// Waits for a place. The oldest scraper whose request isn't complete makes room, else the oldest that takes its
    /// reply. Scrapers that wait for the daemon keep their places.
    fn take(&self, stream: TcpStream) -> ConnectionPermit {
        let mut taken = self.taken();
        let is_full = |taken: &mut Vec<Arc<Scraper>>| taken.len() >= self.most;
        // A scraper that was cut already is about to leave its place.
        let phase = |scraper: &Arc<Scraper>| *lock(&scraper.phase);
        if is_full(&mut taken)
            && !taken.iter().any(|scraper| phase(scraper) == Phase::Cut)
            && let Some(slow) =
                taken.iter().min_by_key(|scraper| phase(scraper)).filter(|slow| phase(slow) < Phase::Waiting)
        {
            slow.cut();
        }
        taken = self.taken.1.wait_while(taken, is_full).unwrap_or_else(PoisonError::into_inner);
        let scraper = Scraper::new(stream);
        taken.push(Arc::clone(&scraper));
        ConnectionPermit { permits: self.clone(), scraper }
    }
}

impl Drop for ConnectionPermit {
    fn drop(&mut self) {
        self.permits.taken().retain(|scraper| !Arc::ptr_eq(scraper, &self.scraper));
        self.permits.taken.1.notify_one();
    }
}

/// A connection that ends at a moment, however slowly it goes on until then.
struct Timed<'a> {
    stream: &'a TcpStream,
    until: Instant,
}

impl Timed<'_> {
    fn left(&self) -> io::Result<Duration> {
        match self.until.saturating_duration_since(Instant::now()) {
            Duration::ZERO => Err(io::ErrorKind::TimedOut.into()),
            left => Ok(left),
        }
    }
}

impl Read for Timed<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(Some(self.left()?))?;
        self.stream.read(buf)
    }
}

impl Write for Timed<'_> {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(Some(self.left()?))?;
        self.stream.write(buf)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

fn answer(scraper: &Arc<Scraper>, (control, names): (&Sender<Message>, &Names), patience: Duration) -> io::Result<()> {
    let mut stream = Timed { stream: &scraper.stream, until: Instant::now() + patience };
    let mut request = Vec::new();
    let mut piece = [0; 1024];
    while !request.windows(4).any(|end| end == b"\r\n\r\n") {
        let len = stream.read(&mut piece)?;
        if len == 0 || request.len() > MAX_REQUEST_BYTES {
            return Ok(());
        }
        request.extend_from_slice(&piece[..len]);
    }
    let (status, kind, body) = match request.split(|byte| *byte == b' ').take(2).collect::<Vec<_>>()[..] {
        _ if matches!(names, Names::Local(more) if !has_local_name(&request, more)) => {
            let words = "the numbers are read by an address or as localhost\n";
            ("421 Misdirected Request", "text/plain", words.to_owned())
        }
        [b"GET", b"/metrics" | b"/"] => match page(scraper, control, stream.left()?) {
            Some(page) => ("200 OK", "application/openmetrics-text; version=1.0.0; charset=utf-8", page),
            None => ("503 Service Unavailable", "text/plain", "the daemon is busy or shutting down\n".to_owned()),
        },
        [b"GET", _] => ("404 Not Found", "text/plain", "see /metrics\n".to_owned()),
        _ => ("405 Method Not Allowed", "text/plain", "only GET\n".to_owned()),
    };
    scraper.enter(Phase::Taking);
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes())?;
    stream.write_all(body.as_bytes())
}

/// True where each field `Host` of the request has a local name, or none is there.
fn has_local_name(request: &[u8], more: &[String]) -> bool {
    let text = String::from_utf8_lossy(request);
    let fields = text.split("\r\n").filter_map(|line| line.split_once(':'));
    // A line that begins or a name that ends with blanks is wrong, and a proxy may take it for the field.
    let mut hosts = fields.filter(|(name, _)| name.trim().eq_ignore_ascii_case("host"));
    hosts.all(|(_, host)| is_local_name(host.trim(), more))
}

fn page(scraper: &Arc<Scraper>, control: &Sender<Message>, left: Duration) -> Option<String> {
    let (reply, answer) = mpsc::sync_channel(1);
    scraper.enter(Phase::Waiting);
    let awaiting = Awaiting(Arc::downgrade(scraper));
    control.send(Message::Metrics { reply, is_awaited: Box::new(move || awaiting.is_there()) }).ok()?;
    // Enough time is kept back to answer when the control thread has none.
    answer.recv_timeout(left.mul_f64(0.9)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inbox::inbox;

    fn connection() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (client, listener.accept().unwrap().0)
    }

    #[test]
    fn slow_sender_gets_no_more_time_than_others() {
        let (mut client, server) = connection();
        let (control, _messages) = inbox();
        let answering =
            thread::spawn(move || answer(&Scraper::new(server), (&control, &Names::Any), Duration::from_millis(200)));
        // Each byte comes long before a read of its own would be given up.
        let sent = (0..100_000).find(|_| {
            thread::sleep(Duration::from_millis(5));
            client.write_all(b"x").is_err()
        });
        assert!(sent.is_some(), "the connection must end");
        let error = answering.join().unwrap().expect_err("its time was up");
        assert!(matches!(error.kind(), io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock), "{error}");
    }

    #[test]
    fn who_takes_nothing_has_no_more_time_than_others() {
        let (mut client, server) = connection();
        let (control, messages) = inbox();
        let page = thread::spawn(move || {
            cowshed_storage::rt::block_on(async {
                let Message::Metrics { reply, .. } = messages.receive().await else {
                    panic!("only pages are asked for")
                };
                reply.send("x".repeat(64 << 20)).unwrap();
            });
        });
        client.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
        let error = answer(&Scraper::new(server), (&control, &Names::Any), Duration::from_secs(2))
            .expect_err("its time was up");
        assert!(matches!(error.kind(), io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock), "{error}");
        page.join().unwrap();
    }

    #[test]
    fn a_daemon_without_time_says_so() {
        let (mut client, server) = connection();
        let (control, _messages) = inbox();
        client.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
        answer(&Scraper::new(server), (&control, &Names::Any), Duration::from_millis(500)).unwrap();
        let mut said = String::new();
        client.read_to_string(&mut said).unwrap();
        assert!(said.starts_with("HTTP/1.1 503"), "{said}");
    }

    #[test]
    fn names_of_other_hosts_get_no_numbers() {
        for (host, status) in [
            ("Host: 127.0.0.1:9100\r\n", 503),
            ("Host: numbers.example.org:9100\r\n", 503),
            ("host: localhost\r\n", 503),
            ("", 503),
            ("HOST: rebound.example.org\r\n", 421),
            ("Host: localhost\r\nHost: x\r\n", 421),
            (" Host: rebound.example.org\r\n", 421),
            ("Host\t: rebound.example.org\r\n", 421),
        ] {
            let (mut client, server) = connection();
            let (control, _messages) = inbox();
            client.write_all(format!("GET /metrics HTTP/1.1\r\n{host}\r\n").as_bytes()).unwrap();
            let patience = Duration::from_millis(300);
            let names = Names::Local(vec!["numbers.example.org".to_owned()]);
            answer(&Scraper::new(server), (&control, &names), patience).unwrap();
            let mut said = String::new();
            client.read_to_string(&mut said).unwrap();
            assert!(said.starts_with(&format!("HTTP/1.1 {status}")), "{host}: {said}");
        }
    }

    #[test]
    fn places_are_bounded_and_given_back() {
        let permits = ConnectionPermits::new(2);
        let connections = [connection(), connection(), connection()];
        let server = |n: usize| connections[n].1.try_clone().unwrap();
        let (first, second) = (permits.take(server(0)), permits.take(server(1)));
        // These two wait for the daemon: no fault of theirs.
        first.scraper.enter(Phase::Waiting);
        second.scraper.enter(Phase::Waiting);
        assert_eq!(permits.taken().len(), 2);
        let waiting = {
            let (permits, server) = (permits.clone(), server(2));
            thread::spawn(move || drop(permits.take(server)))
        };
        drop(first);
        waiting.join().unwrap();
        assert_eq!(*lock(&second.scraper.phase), Phase::Waiting);
        drop(second);
        assert_eq!(permits.taken().len(), 0);
    }

    #[test]
    fn silent_scrapers_in_all_places_make_room() {
        let (control, messages) = inbox();
        let pages = thread::spawn(move || {
            cowshed_storage::rt::block_on(async {
                while let Message::Metrics { reply, .. } = messages.receive().await {
                    reply.send("# EOF\n".to_owned()).unwrap();
                }
            });
        });
        let address = listen("127.0.0.1:0", control.clone()).unwrap();
        let started = Instant::now();
        let mut silent: Vec<TcpStream> =
            (0..MAX_SCRAPERS).map(|_| TcpStream::connect(&address).expect("it listens")).collect();
        // Connections are accepted in their order.
        let mut said = String::new();
        let mut asking = TcpStream::connect(&address).unwrap();
        asking.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
        asking.read_to_string(&mut said).unwrap();
        assert!(said.ends_with("# EOF\n"), "{said}");
        assert!(started.elapsed() < PATIENCE, "it waited for the time of a silent one to be up");
        // The oldest was cut, the youngest still has its time.
        silent[0].set_read_timeout(Some(PATIENCE)).unwrap();
        assert_eq!(silent[0].read(&mut [0; 16]).unwrap(), 0, "the oldest one ends");
        let youngest = silent.last_mut().unwrap();
        said.clear();
        youngest.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
        youngest.read_to_string(&mut said).unwrap();
        assert!(said.ends_with("# EOF\n"), "{said}");
        assert!(control.send(Message::Stop(crate::StopReason::Quit)).is_ok());
        pages.join().unwrap();
    }

    #[test]
    fn silent_scraper_makes_room_and_a_waiting_one_not() {
        let permits = ConnectionPermits::new(2);
        let connections = [connection(), connection(), connection()];
        let server = |n: usize| connections[n].1.try_clone().unwrap();
        let (waiting, taking) = (permits.take(server(0)), permits.take(server(1)));
        waiting.scraper.enter(Phase::Waiting);
        taking.scraper.enter(Phase::Taking);
        let ending = thread::spawn(move || {
            // Like the thread of a scraper: its connection ends, then its place is free.
            assert_eq!((&taking.scraper.stream).read(&mut [0; 16]).unwrap(), 0);
            drop(taking);
        });
        let third = permits.take(server(2));
        ending.join().unwrap();
        assert_eq!(*lock(&waiting.scraper.phase), Phase::Waiting);
        drop((waiting, third));
        assert_eq!(permits.taken().len(), 0);
    }

    #[test]
    fn no_page_is_rendered_for_a_scraper_that_has_gone() {
        let (mut client, server) = connection();
        let (control, messages) = inbox();
        client.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
        let scraper = Scraper::new(server);
        let is_awaited = {
            let answering = thread::spawn(move || answer(&scraper, (&control, &Names::Any), Duration::from_secs(2)));
            let message = cowshed_storage::rt::block_on(messages.receive());
            let Message::Metrics { is_awaited, reply } = message else { panic!("only pages are asked for") };
            assert!(is_awaited(), "it waits");
            // The daemon has no time until the scraper's is up.
            answering.join().unwrap().unwrap();
            drop(reply);
            is_awaited
        };
        assert!(!is_awaited(), "its time is up");
        // A scraper that stays, but was told that the daemon is busy, or was cut, isn't there either.
        let scraper = Scraper::new(connection().1);
        for phase in [Phase::Taking, Phase::Cut] {
            scraper.enter(phase);
            assert!(!Awaiting(Arc::downgrade(&scraper)).is_there(), "{phase:?}");
        }
    }
}
