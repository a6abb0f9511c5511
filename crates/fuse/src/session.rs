// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The thread that takes requests of the kernel.

use crate::operations::{FuseOutcome, Given, RequestWork};
use crate::running::{RunningRequest, answer};
use crate::server::{MAX_REQUEST_BYTES, MountState, Order};
use cowshed_fuse_proto::request::{HEADER_BYTES, MAX_FIELDS_BYTES};
use cowshed_fuse_proto::{
    InitReply, MAJOR, MIN_BUFFER_BYTES, MIN_MINOR, Malformed, Operation, RequestHeader, WRITE_HEAD_BYTES, features,
    reply,
};
use cowshed_image::graph::Queue;
use cowshed_storage::rt::{self, within};
use cowshed_storage::{FuseDevice, IoBuf};
use cowshed_types::{Errno, Result};
use futures_util::future::LocalBoxFuture;
use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt, StreamExt, poll};
use rustix::io::Errno as Number;
use std::collections::VecDeque;
use std::future::poll_fn;
use std::io::IoSliceMut;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};
use std::time::Duration;

/// Buffers of the requests of one thread, in bytes; one request may always run.
const MAX_BYTES_IN_FLIGHT: u64 = 32 << 20;
/// Of these, reads begin below this many. The others wait without a buffer: a disk whose reads hang stops no other request.
const MAX_READ_BYTES: u64 = 24 << 20;
/// The most reads that wait so.
const MAX_POSTPONED: usize = 1024;
/// Requests that a thread takes before it looks at those that run.
const MAX_AT_ONCE: usize = 64;
/// Data of a write up to this many bytes is copied into a buffer of its own length.
const COPIED_BYTES: usize = 64 << 10;
/// Requests that the kernel may have in the background, where direct asynchronous I/O is.
const MAX_BACKGROUND: u16 = 256;
/// A page of the kernel, in bytes: the smallest there is, so that the count holds everywhere.
const PAGE_BYTES: u32 = 4096;
/// The time between two looks at callers that may have to go.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Reads that take longer don't keep the owner from hearing that the file is unmounted.
const READ_PATIENCE: Duration = Duration::from_secs(1);

/// The end of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SessionEnd {
    /// An order of the owner.
    Told,
    /// The file system is not mounted any more.
    Unmounted,
    /// The device gave an error.
    Failed(Errno),
}

/// A wait for requests.
type Ready = LocalBoxFuture<'static, std::result::Result<(), Errno>>;

/// A wait for orders of the owner and of other threads.
type Orders = LocalBoxFuture<'static, Order>;

/// The event that a session has waited for.
enum News {
    Order(Order),
    Request(std::result::Result<(), Errno>),
    /// A request that ran; the bytes of its buffers.
    Ended(u64),
    /// Time to look at callers.
    Look,
}

/// The buffers of the next request.
struct Intake {
    head: [u8; WRITE_HEAD_BYTES],
    data: IoBuf,
}

struct Session {
    shared: Arc<MountState>,
    device: FuseDevice,
    disk: Queue,
    intake: Intake,
    bytes: u64,
    running: FuturesUnordered<RunningRequest>,
    /// Reads that wait for room.
    postponed: VecDeque<RunningRequest>,
    /// The next look at callers, where one has to be watched.
    look: Option<LocalBoxFuture<'static, ()>>,
}

/// Serves until the end.
pub(crate) async fn serve(shared: Arc<MountState>, device: FuseDevice) -> Result<SessionEnd> {
    let disk = shared.attachment.queue();
    let data = IoBuf::try_scratch(MAX_REQUEST_BYTES as usize + MIN_BUFFER_BYTES)?;
    let intake = Intake { head: [0; WRITE_HEAD_BYTES], data };
    let mut session = Session {
        shared,
        device,
        disk,
        intake,
        bytes: 0,
        running: FuturesUnordered::new(),
        postponed: VecDeque::new(),
        look: None,
    };
    let end = session.run().await;
    session.running.extend(std::mem::take(&mut session.postponed));
    if matches!(end, SessionEnd::Unmounted) {
        session.leave_reads().await;
    }
    while session.running.next().await.is_some() {}
    Ok(end)
}

/// Waits for requests.
fn wait(device: &FuseDevice) -> Ready {
    let device = device.clone();
    async move { device.wait().await }.boxed_local()
}

/// Waits for the end, or for more interrupts than `seen`.
fn orders(shared: &Arc<MountState>, seen: u64) -> Orders {
    let shared = Arc::clone(shared);
    async move { shared.orders.wait(|orders| orders.since(seen)).await }.boxed_local()
}

impl Session {
    async fn run(&mut self) -> SessionEnd {
        let shared = Arc::clone(&self.shared);
        let device = self.device.clone();
        let (mut told, mut ready) = (orders(&shared, 0), wait(&device));
        loop {
            if let Some(order) = told.as_mut().now_or_never() {
                match self.obey(order) {
                    Some(seen) => told = orders(&shared, seen),
                    None => return SessionEnd::Told,
                }
            }
            if self.look.as_mut().is_some_and(|look| look.now_or_never().is_some()) {
                self.look_at_callers();
            }
            let took = match self.take().await {
                Ok(took) => took,
                Err(end) => return end,
            };
            let has_ended = self.collect();
            self.begin_postponed().await;
            if has_ended || took {
                // Completions, and other threads' wakes, are looked at in between.
                rt::yield_now().await;
                continue;
            }
            match poll_fn(|context| self.news(context, &mut told, &mut ready)).await {
                News::Order(order) => match self.obey(order) {
                    Some(seen) => told = orders(&shared, seen),
                    None => return SessionEnd::Told,
                },
                // One wait for many rounds: it is renewed only when it has ended.
                News::Request(Ok(())) => ready = wait(&device),
                News::Request(Err(errno)) => return SessionEnd::Failed(errno),
                News::Ended(bytes) => self.bytes -= bytes,
                News::Look => self.look_at_callers(),
            }
        }
    }

    /// An order, a request where there is room for one, the end of one, or the time for a look.
    fn news(&mut self, context: &mut Context<'_>, told: &mut Orders, ready: &mut Ready) -> Poll<News> {
        if let Poll::Ready(order) = told.as_mut().poll(context) {
            return Poll::Ready(News::Order(order));
        }
        if self.has_room()
            && let Poll::Ready(outcome) = ready.as_mut().poll(context)
        {
            return Poll::Ready(News::Request(outcome));
        }
        if let Poll::Ready(Some(bytes)) = self.running.poll_next_unpin(context) {
            return Poll::Ready(News::Ended(bytes));
        }
        match &mut self.look {
            Some(look) => look.as_mut().poll(context).map(|()| News::Look),
            None => Poll::Pending,
        }
    }

    /// Follows an order; the interrupts that are seen then, or none for the end.
    fn obey(&mut self, order: Order) -> Option<u64> {
        match order {
            Order::Stop => None,
            Order::Interrupts { seen, uniques } => {
                for unique in uniques {
                    self.interrupt(unique);
                }
                Some(seen)
            }
        }
    }

    /// Notes a signal of the caller of a request. True where this thread has that request.
    fn interrupt(&mut self, unique: u64) -> bool {
        let Some(found) = self.requests().find(|running| running.unique() == unique) else { return false };
        found.note_signal();
        found.leave_dying(false);
        self.postponed.retain(|running| !running.is_answered());
        self.watch();
        true
    }

    /// All its requests that have no end yet.
    fn requests(&mut self) -> impl Iterator<Item = &mut RunningRequest> {
        let running = Pin::new(&mut self.running).iter_pin_mut().map(Pin::into_inner);
        running.chain(&mut self.postponed)
    }

    /// Sets the time of a look, where a caller has to be watched. Without room for a request there is none for the report of a signal.
    fn watch(&mut self) {
        if self.look.is_none() && (!self.has_room() || self.requests().any(|running| running.is_watched())) {
            self.look = Some(rt::sleep(LOOK_EVERY).boxed_local());
        }
    }

    /// Lets callers go that have been killed.
    fn look_at_callers(&mut self) {
        self.look = None;
        let is_full = !self.has_room();
        for running in self.requests() {
            running.leave_dying(is_full);
        }
        self.postponed.retain(|running| !running.is_answered());
        self.watch();
    }

    /// The file is unmounted. Reads of a disk that never answers don't keep the owner from hearing of it, if all threads have nothing
    /// else to end. Changes and flushes do.
    async fn leave_reads(&mut self) {
        let mut is_counted = false;
        loop {
            match within(READ_PATIENCE, self.running.next()).await {
                Some(Some(_)) => {}
                Some(None) => {
                    self.shared.reading.fetch_sub(usize::from(is_counted), Ordering::SeqCst);
                    return;
                }
                None if !is_counted && self.requests().all(|running| running.is_read()) => {
                    self.shared.reading.fetch_add(1, Ordering::SeqCst);
                    is_counted = true;
                }
                None if is_counted && self.shared.has_reads_alone() => {
                    self.shared.tell_unmounted();
                    return;
                }
                None => {}
            }
        }
    }

    fn has_room(&self) -> bool {
        self.bytes < MAX_BYTES_IN_FLIGHT && self.postponed.len() < MAX_POSTPONED
    }

    /// Takes the available requests and begins them. True: there was something.
    async fn take(&mut self) -> std::result::Result<bool, SessionEnd> {
        #[cfg(test)]
        if tests::FAILS.load(std::sync::atomic::Ordering::SeqCst) {
            return Err(SessionEnd::Failed(Errno(Number::IO.raw_os_error())));
        }
        let mut count = 0;
        while count < MAX_AT_ONCE && self.has_room() {
            let Intake { head, data } = &mut self.intake;
            let received = self.device.receive_now(&mut [IoSliceMut::new(head), IoSliceMut::new(data)]);
            match received {
                Ok(received) => self.begin(received).await,
                Err(Errno(errno)) if errno == Number::AGAIN.raw_os_error() => break,
                Err(Errno(errno)) if errno == Number::NODEV.raw_os_error() => return Err(SessionEnd::Unmounted),
                Err(errno) => return Err(SessionEnd::Failed(errno)),
            }
            count += 1;
        }
        if count > 0 {
            rt::note_request();
        }
        Ok(count > 0)
    }

    /// Begins the request in the intake, and answers it where that needs no waiting.
    async fn begin(&mut self, received: usize) {
        let (header, operation) = match self.parse(received) {
            Ok(parsed) => parsed,
            Err(error) => {
                tracing::warn!(export = self.shared.config.id, %error, "a request that breaks the protocol");
                // Without its number there is no reply.
                if let Ok(header) = RequestHeader::parse(&self.intake.head, received) {
                    self.answer(header.unique, Err(Errno(Number::IO.raw_os_error())));
                }
                return;
            }
        };
        tracing::trace!(export = self.shared.config.id, unique = header.unique, ?operation, "request");
        let data = match operation {
            Operation::Unanswered => return,
            Operation::Interrupt { unique } => {
                // Another thread may have the request, which it has begun by now.
                if !self.interrupt(unique) && self.shared.config.threads > 1 {
                    self.shared.orders.change(|orders| orders.interrupt(unique));
                }
                return;
            }
            Operation::Init { major, minor, features, max_readahead } => {
                let wanted = wanted(self.shared.config.growable);
                self.answer(header.unique, init(major, minor, features & wanted, max_readahead));
                return;
            }
            Operation::Write { len, .. } => match self.data(len as usize) {
                Ok(data) => Some(data),
                // Without memory for this one the next one may have some.
                Err(error) => {
                    self.answer(header.unique, Err(error.errno()));
                    return;
                }
            },
            _ => None,
        };
        let work = RequestWork { shared: Arc::clone(&self.shared), disk: self.disk.clone() };
        let work = work.run(operation, data).boxed_local();
        let running = RunningRequest::new(&header, operation, Arc::clone(&self.shared), self.device.clone(), work);
        let is_read = matches!(operation, Operation::Read { .. });
        match is_read && (self.bytes >= MAX_READ_BYTES || !self.postponed.is_empty()) {
            true => self.postponed.push_back(running),
            false => self.start(running).await,
        }
        if !self.has_room() {
            self.watch();
        }
    }

    async fn start(&mut self, mut running: RunningRequest) {
        if poll!(&mut running).is_pending() {
            self.bytes += running.bytes();
            let is_watched = running.is_watched();
            self.running.push(running);
            if is_watched {
                self.watch();
            }
        }
    }

    /// Begins reads that there is room for now.
    async fn begin_postponed(&mut self) {
        while self.bytes < MAX_READ_BYTES
            && let Some(running) = self.postponed.pop_front()
        {
            self.start(running).await;
        }
    }

    fn parse(&self, received: usize) -> std::result::Result<(RequestHeader, Operation), Malformed> {
        let Intake { head, data } = &self.intake;
        let header = RequestHeader::parse(head, received)?;
        let mut fields = [0; MAX_FIELDS_BYTES];
        let (first, rest) = fields.split_at_mut(WRITE_HEAD_BYTES - HEADER_BYTES);
        first.copy_from_slice(&head[HEADER_BYTES..]);
        rest.copy_from_slice(&data[..MAX_FIELDS_BYTES - (WRITE_HEAD_BYTES - HEADER_BYTES)]);
        let len = (received - HEADER_BYTES).min(MAX_FIELDS_BYTES);
        Operation::parse(&header, &fields[..len]).map(|operation| (header, operation))
    }

    /// The data of a write: a copy, or the intake's own buffer, which gets another one.
    fn data(&mut self, len: usize) -> Result<IoBuf> {
        let data = &mut self.intake.data;
        if len <= COPIED_BYTES {
            return Ok(IoBuf::copy_from(&data[..len]));
        }
        let mut taken = std::mem::replace(data, IoBuf::try_scratch(data.len())?);
        taken.truncate(len);
        Ok(taken)
    }

    /// Lets requests go on, and counts those that have ended. True: there was one.
    fn collect(&mut self) -> bool {
        let mut any = false;
        while let Some(Some(bytes)) = self.running.next().now_or_never() {
            self.bytes -= bytes;
            any = true;
        }
        any
    }

    fn answer(&self, unique: u64, outcome: FuseOutcome) {
        answer(&self.shared, &self.device, unique, &outcome);
    }
}

/// Features of use. With `ATOMIC_O_TRUNC` the kernel takes the file for empty and drops the pages of mappings. So a
/// disk of a fixed length doesn't use it, and answers a change of its size instead.
fn wanted(growable: bool) -> u64 {
    match growable {
        true => features::WANTED,
        false => features::WANTED & !features::ATOMIC_O_TRUNC,
    }
}

fn init(major: u32, minor: u32, accepted: u64, max_readahead: u32) -> FuseOutcome {
    if major > MAJOR {
        return Ok(Given::Fields(reply::older_version()));
    }
    if major < MAJOR || minor < MIN_MINOR {
        tracing::error!(major, minor, "the kernel's FUSE is too old");
        return Err(Errno(Number::PROTO.raw_os_error()));
    }
    let reply = InitReply {
        features: accepted,
        max_readahead,
        max_background: MAX_BACKGROUND,
        max_write: MAX_REQUEST_BYTES,
        max_pages: (MAX_REQUEST_BYTES / PAGE_BYTES) as u16,
    };
    Ok(Given::Fields(reply.body()))
}

#[cfg(test)]
mod tests {
    use crate::{AllowOther, MountPoint, Server, ServerConfig};
    use cowshed_image::OpenRequest;
    use cowshed_image::graph::{AttachRequest, Graph};
    use cowshed_storage::rt;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::{Arc, mpsc};
    use std::time::Duration;

    /// From now on threads get errors of the device.
    pub(super) static FAILS: AtomicBool = AtomicBool::new(false);

    /// Two processes look at one file, and then both mount.
    #[test]
    fn second_mount_on_one_file_is_refused() {
        let folder = cowshed_testkit::qemu::temp_dir();
        let point = folder.path().join("m");
        std::fs::write(&point, "").unwrap();
        let looked = || MountPoint::new(point.to_str().unwrap()).unwrap();
        let (first, second) = (looked(), looked());
        let mount = |point| {
            crate::mount::Mount { point, writable: false, allow_other: AllowOther::Auto, max_read: 4096 }.mount()
        };
        let mounted = mount(&first).unwrap();
        let refused = mount(&second).expect_err("another disk stands there");
        assert!(refused.to_string().contains("shows another disk already"), "{refused}");
        assert_eq!(cowshed_storage::mounted_device(&point).unwrap(), mounted.device, "the first one stays");
        crate::unmount(&mounted.path).unwrap();
        assert_eq!(crate::find_mount(&mounted.path).unwrap(), None);
    }

    #[test]
    fn session_with_failed_threads_is_unmounted() {
        let folder = cowshed_testkit::qemu::temp_dir();
        let (image, point) = (folder.path().join("d.raw"), folder.path().join("m"));
        std::fs::write(&image, vec![5; 1 << 20]).unwrap();
        std::fs::write(&point, "").unwrap();
        let options = format!("driver=raw,node-name=d,file.driver=file,file.filename={}", image.display());
        let request = OpenRequest::image_opts(&options).unwrap().writable(true);
        let graph = Graph::new(&cowshed_image::DRIVERS);
        let attachment = rt::block_on(async {
            let node = graph.add_with(request).await.unwrap();
            graph.attach(&node, AttachRequest::export("m", true)).await.unwrap()
        });
        let config = ServerConfig {
            id: "m".to_owned(),
            writable: true,
            growable: false,
            writethrough: false,
            allow_other: AllowOther::Auto,
            threads: 2,
            poll_limit: rt::PollLimit::default(),
            guard: None,
        };
        let (told, ended) = mpsc::channel();
        let at = MountPoint::new(point.to_str().unwrap()).unwrap();
        let on_unmount = Box::new(move || told.send(()).unwrap());
        let server = Server::start(config, &at, Arc::clone(&attachment), (on_unmount, Box::new(|| ()))).unwrap();
        let read = |path: &std::path::Path| std::fs::read(path);
        assert_eq!(read(&point).unwrap(), vec![5; 1 << 20]);
        FAILS.store(true, Ordering::SeqCst);
        // A thread that waits for a request answers that one, and meets the failure behind it.
        let path = point.clone();
        let reader = std::thread::spawn(move || {
            loop {
                match std::fs::read(&path) {
                    Ok(bytes) if bytes.len() == 1 << 20 => {}
                    last => break last,
                }
            }
        });
        ended.recv_timeout(Duration::from_secs(20)).expect("the owner is told");
        rt::block_on(server.stop());
        let last = reader.join().unwrap();
        assert!(last.as_ref().map_or(true, Vec::is_empty), "no answer comes, or the mount is gone: {last:?}");
        assert_eq!(read(&point).unwrap(), b"", "the mount is gone");
        rt::block_on(attachment.detach()).unwrap();
    }
}
