// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Where scrapers get the page: as much HTTP as they need. Each has a thread of its own, so that none waits for a slow one.

use crate::control::Message;
use crate::inbox::Sender;
use cowshed_block::{Error, Result};
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

/// A scraper gets this long, from its connection on, to say what it wants, to wait for it and to take it.
const PATIENCE: Duration = Duration::from_secs(5);

/// Scrapers at a time; the next ones wait to be accepted.
const MAX_SCRAPERS: usize = 16;

/// Longest request that is read, in bytes.
const MAX_REQUEST_BYTES: usize = 8 << 10;

/// Starts the endpoint; returns where it is, with the port that was found free.
pub(crate) fn listen(address: &str, control: Sender<Message>) -> Result<String> {
    let failed = |error: io::Error| Error::io(&error, "could not listen").file(address.to_owned());
    let listener = TcpListener::bind(address).map_err(failed)?;
    let bound = listener.local_addr().map_err(failed)?.to_string();
    let accept = move || accept(&listener, &control);
    thread::Builder::new().name("metrics".into()).spawn(accept).map_err(failed)?;
    Ok(bound)
}

fn accept(listener: &TcpListener, control: &Sender<Message>) {
    let places = Places::new(MAX_SCRAPERS);
    loop {
        let place = places.take();
        let spawned = listener.accept().and_then(|(stream, _)| {
            let control = control.clone();
            let serve = move || {
                let _place = place;
                if let Err(error) = answer(stream, &control, PATIENCE) {
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

/// How many more scrapers there may be.
#[derive(Clone)]
struct Places(Arc<(Mutex<usize>, Condvar)>);

/// One scraper's place; dropping it makes room for the next.
struct Place(Places);

impl Places {
    fn new(count: usize) -> Places {
        Places(Arc::new((Mutex::new(count), Condvar::new())))
    }

    fn free(&self) -> MutexGuard<'_, usize> {
        self.0.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a place.
    fn take(&self) -> Place {
        let waited = self.0.1.wait_while(self.free(), |free| *free == 0);
        *waited.unwrap_or_else(PoisonError::into_inner) -= 1;
        Place(self.clone())
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        *self.0.free() += 1;
        self.0.0.1.notify_one();
    }
}

/// A connection that ends at a moment, however slowly it goes on until then.
struct Timed {
    stream: TcpStream,
    until: Instant,
}

impl Timed {
    fn left(&self) -> io::Result<Duration> {
        match self.until.saturating_duration_since(Instant::now()) {
            Duration::ZERO => Err(io::ErrorKind::TimedOut.into()),
            left => Ok(left),
        }
    }
}

impl Read for Timed {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(Some(self.left()?))?;
        self.stream.read(buf)
    }
}

impl Write for Timed {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(Some(self.left()?))?;
        self.stream.write(buf)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

fn answer(stream: TcpStream, control: &Sender<Message>, patience: Duration) -> io::Result<()> {
    let mut stream = Timed { stream, until: Instant::now() + patience };
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
        [b"GET", b"/metrics" | b"/"] => match page(control, stream.left()?) {
            Some(page) => ("200 OK", "application/openmetrics-text; version=1.0.0; charset=utf-8", page),
            None => ("503 Service Unavailable", "text/plain", "the daemon is busy or shutting down\n".to_owned()),
        },
        [b"GET", _] => ("404 Not Found", "text/plain", "see /metrics\n".to_owned()),
        _ => ("405 Method Not Allowed", "text/plain", "only GET\n".to_owned()),
    };
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes())?;
    stream.write_all(body.as_bytes())
}

fn page(control: &Sender<Message>, left: Duration) -> Option<String> {
    let (reply, answer) = mpsc::sync_channel(1);
    control.send(Message::Metrics { reply }).ok()?;
    // Enough is kept back to say so when the control thread has no time.
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
    fn who_sends_a_byte_now_and_then_has_no_more_time_than_others() {
        let (mut client, server) = connection();
        let (control, _messages) = inbox();
        let answering = thread::spawn(move || answer(server, &control, Duration::from_millis(200)));
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
                let Message::Metrics { reply } = messages.receive().await else { panic!("only pages are asked for") };
                reply.send("x".repeat(64 << 20)).unwrap();
            });
        });
        client.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
        let error = answer(server, &control, Duration::from_secs(2)).expect_err("its time was up");
        assert!(matches!(error.kind(), io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock), "{error}");
        page.join().unwrap();
    }

    #[test]
    fn a_daemon_without_time_says_so() {
        let (mut client, server) = connection();
        let (control, _messages) = inbox();
        client.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
        answer(server, &control, Duration::from_millis(500)).unwrap();
        let mut said = String::new();
        client.read_to_string(&mut said).unwrap();
        assert!(said.starts_with("HTTP/1.1 503"), "{said}");
    }

    #[test]
    fn places_are_bounded_and_given_back() {
        let places = Places::new(2);
        let (first, second) = (places.take(), places.take());
        assert_eq!(*places.free(), 0);
        let waiting = {
            let places = places.clone();
            thread::spawn(move || drop(places.take()))
        };
        drop(first);
        waiting.join().unwrap();
        drop(second);
        assert_eq!(*places.free(), 2);
    }
}
