// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The thread of a ring, or of several.

use crate::ledger::SessionLedger;
use crate::line::Line;
use crate::memory::{GuestMemory, MemoryPiece};
use crate::requests::{self, Ended};
use crate::slots::RequestSlots;
use cowshed_image::graph::{Attachment, Queue as Disk};
use cowshed_storage::rt::{self, PollLimit};
use cowshed_storage::signal::{Mailbox, Watched, lock};
use cowshed_storage::{EventCounter, SharedMemory};
use cowshed_types::{Error, Result, slip};
use cowshed_vhost_user_proto::request::{Request, RequestLimits, Status};
use cowshed_vhost_user_proto::ring::RingPlace;
use cowshed_vhost_user_proto::{Inflight, Malformed, Memory, Ring};
use futures_util::FutureExt;
use futures_util::future::{Either, LocalBoxFuture, select};
use std::collections::VecDeque;
use std::future::{pending, poll_fn};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Buffers of the requests of one ring, in bytes; one request may always run.
const MAX_BYTES_IN_FLIGHT: u64 = 32 << 20;
/// Chains that are taken before the thread looks at its orders.
const MAX_CHAINS_AT_ONCE: usize = 64;
/// Where no kick can come, a ring is looked at so often.
const LOOK_PAUSE: Duration = Duration::from_micros(100);

/// The way of carrying requests out: the same for all rings of a session.
#[derive(Clone, Debug)]
pub(crate) struct RingRules<P = MemoryPiece> {
    /// The export's name.
    pub id: Arc<str>,
    /// The limits by which requests are checked; the size is looked up for each.
    pub limits: RequestLimits,
    /// Each change is durable before its status is reported, whatever the driver's switch.
    pub writethrough: bool,
    /// The driver's own switch.
    pub writeback: Arc<AtomicBool>,
    /// Changes that die with this process.
    pub ledger: Arc<SessionLedger<P>>,
    /// The memory of a piece, where the kernel may fill and take it; `None`: all data has a copy.
    pub memory_of: Option<fn(&P) -> &SharedMemory>,
}

impl<P> RingRules<P> {
    pub fn is_durable(&self) -> bool {
        self.writethrough || !self.writeback.load(Ordering::Acquire)
    }
}

/// The memory of the guest now, for all rings.
pub(crate) type MemoryNow<M = GuestMemory> = Arc<Mutex<Arc<M>>>;

/// The beginning of a ring.
pub(crate) struct Start<M: Memory = GuestMemory> {
    pub place: RingPlace,
    pub base: u16,
    pub memory: MemoryNow<M>,
    /// `None`: the ring is looked at from time to time.
    pub kick: Option<EventCounter>,
    pub line: Arc<Line>,
    /// The notes of its requests in flight.
    pub notes: Option<M::Piece>,
    pub ways: RingRules<M::Piece>,
}

pub(crate) enum Message<M: Memory = GuestMemory> {
    Start(Box<Start<M>>, Arc<Watched<Option<Result<(), Malformed>>>>),
    /// Take no more, end requests in flight, and return the place to go on from. Requests of an earlier life that have
    /// not begun are carried out only for a front end that is there: another one finds them noted.
    Stop {
        base: Arc<Watched<Option<u16>>>,
        is_left: bool,
    },
    /// The line owes its front end a call.
    Call,
    End,
}

/// The owner's end of a ring's server, which shares its thread with others where there are more rings than threads.
#[derive(Debug)]
pub(crate) struct RingHandle {
    mailbox: Arc<Mailbox<Message>>,
    /// The thread has ended.
    ended: Arc<Watched<bool>>,
}

impl std::fmt::Debug for Message {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Message")
    }
}

/// Notes that a thread has ended, also by a panic.
struct Ending(Arc<Watched<bool>>);

impl Drop for Ending {
    fn drop(&mut self) {
        self.0.change(|ended| *ended = true);
    }
}

impl RingHandle {
    /// Starts a thread that serves `count` rings.
    pub fn spawn(
        name: String,
        count: usize,
        attachment: &Arc<Attachment>,
        poll_limit: &PollLimit,
    ) -> Result<Vec<RingHandle>> {
        let ended: Arc<Watched<bool>> = Arc::default();
        let queues: Vec<RingHandle> =
            (0..count).map(|_| RingHandle { mailbox: Arc::default(), ended: Arc::clone(&ended) }).collect();
        let inboxes: Vec<_> = queues.iter().map(|queue| Arc::clone(&queue.mailbox)).collect();
        let (attachment, poll_limit, ending) = (Arc::clone(attachment), poll_limit.clone(), Ending(ended));
        let (prepared, is_prepared) = std::sync::mpsc::sync_channel(1);
        let serve = move || {
            let _ending = ending;
            let outcome = rt::prepare();
            let can_serve = outcome.is_ok();
            if prepared.send(outcome).is_ok() && can_serve {
                rt::block_on(async move {
                    rt::poll_up_to(poll_limit);
                    rt::sleep_exactly();
                    let disk = attachment.queue();
                    let mut inboxes = inboxes.into_iter();
                    let first = inboxes.next();
                    let serve = |inbox| rt::spawn(serve_all(disk.clone(), inbox));
                    let others: Vec<_> = inboxes.map(serve).collect();
                    if let Some(first) = first {
                        serve_all(disk, first).await;
                    }
                    for other in others {
                        other.await;
                    }
                });
            }
        };
        let spawned = std::thread::Builder::new().name(name).spawn(serve);
        spawned.map_err(|error| Error::io(&error, "could not start a thread"))?;
        match is_prepared.recv() {
            Ok(outcome) => outcome.map(|()| queues),
            Err(_) => Err(Error::internal("a ring's thread ended at once")),
        }
    }

    /// Runs a ring, which must not run yet. An error: it can't be one.
    pub async fn start(&self, start: Start) -> Result<(), Malformed> {
        let outcome: Arc<Watched<Option<Result<(), Malformed>>>> = Arc::default();
        self.mailbox.send(Message::Start(Box::new(start), Arc::clone(&outcome)));
        outcome.wait(|outcome| outcome.take()).await
    }

    /// Stops a ring that runs, whose front end may have left; returns the index of the next chain when none is in flight any more.
    pub async fn stop(&self, is_left: bool) -> u16 {
        let base: Arc<Watched<Option<u16>>> = Arc::default();
        self.mailbox.send(Message::Stop { base: Arc::clone(&base), is_left });
        base.wait(|base| base.take()).await
    }

    /// Has the ring's thread call the front end, if the line owes that.
    pub fn call(&self) {
        self.mailbox.send(Message::Call);
    }

    /// Tells the thread to end.
    pub fn end(&self) {
        self.mailbox.send(Message::End);
    }

    /// Waits for the thread's end.
    pub async fn join(&self) {
        self.ended.wait(|ended| ended.then_some(())).await;
    }
}

/// A ring that runs.
pub(crate) struct RunningRing<M: Memory = GuestMemory> {
    ring: Ring<M::Piece>,
    start: Start<M>,
    /// Those of the start, for the requests of this thread.
    ways: Rc<RingRules<M::Piece>>,
    inflight: Option<Inflight<M::Piece>>,
    bytes: u64,
    /// Requests of an earlier life that have not begun.
    left: VecDeque<u16>,
    /// The driver has broken the protocol: nothing more is taken.
    is_broken: bool,
    slots: RequestSlots<M::Piece>,
}

async fn serve_all(disk: Disk, inbox: Arc<Mailbox<Message>>) {
    loop {
        match inbox.receive().await {
            Message::Start(start, outcome) => match RunningRing::new(*start) {
                Ok(running) => {
                    outcome.change(|outcome| *outcome = Some(Ok(())));
                    if !running.serve(&disk, &inbox).await {
                        return;
                    }
                }
                Err(error) => outcome.change(|outcome| *outcome = Some(Err(error))),
            },
            // It doesn't run: the session asks only for one that does.
            Message::Stop { base, .. } => base.change(|base| *base = Some(0)),
            // It calls when it starts.
            Message::Call => {}
            Message::End => return,
        }
    }
}

impl<M: Memory<Piece: Clone + 'static>> RunningRing<M> {
    pub(crate) fn new(start: Start<M>) -> Result<RunningRing<M>, Malformed> {
        let memory = Arc::clone(&lock(&start.memory));
        let mut ring = Ring::new(&*memory, &start.place, start.base)?;
        let mut left = VecDeque::new();
        let inflight = match &start.notes {
            Some(notes) => {
                let (inflight, heads) = Inflight::open(notes.clone(), ring.size(), ring.used_index())?;
                ring.resume(&heads)?;
                left = heads.into();
                Some(inflight)
            }
            None => None,
        };
        if !left.is_empty() {
            tracing::info!(export = &*start.ways.id, count = left.len(), "requests of an earlier life are carried out");
        }
        let ways = Rc::new(start.ways.clone());
        Ok(RunningRing { ring, start, ways, inflight, bytes: 0, left, is_broken: false, slots: RequestSlots::new() })
    }

    /// Serves until the order to stop. False: the thread is to end.
    pub(crate) async fn serve(mut self, disk: &Disk, inbox: &Mailbox<Message<M>>) -> bool {
        let mut kick = self.kick();
        let mut told = inbox.receive().boxed_local();
        self.call_owed();
        let message = loop {
            match (&mut told).now_or_never() {
                Some(Message::Call) => {
                    told = inbox.receive().boxed_local();
                    self.call_owed();
                }
                Some(message) => break message,
                None => {}
            }
            let took = self.take(disk);
            let ended = self.collect();
            if took || ended {
                // Completions, and other threads' wakes, are looked at in between.
                rt::yield_now().await;
                continue;
            }
            if !self.is_broken && self.has_room() && (!self.left.is_empty() || self.ring.listen()) {
                continue;
            }
            let news = async {
                let event = select(&mut told, &mut kick);
                match self.slots.is_empty() {
                    true => News::of(event.await),
                    false => match select(event, poll_fn(|context| self.slots.poll_ended(context))).await {
                        Either::Left((event, _)) => News::of(event),
                        Either::Right((ended, _)) => News::Ended(ended),
                    },
                }
            };
            match news.await {
                News::Told(Message::Call) => {
                    told = inbox.receive().boxed_local();
                    self.call_owed();
                }
                News::Told(message) => break message,
                News::Kicked => kick = self.kick(),
                News::Ended(ended) => {
                    if let Some(ended) = ended {
                        self.give_back(ended);
                    }
                    self.collect();
                    self.call();
                }
            }
        };
        if !matches!(message, Message::Stop { is_left: false, .. }) {
            self.left.clear();
        }
        loop {
            // The base of the ring is behind these.
            self.begin_left(disk);
            match poll_fn(|context| self.slots.poll_ended(context)).await {
                Some(ended) => self.give_back(ended),
                None if self.left.is_empty() || self.is_broken => break,
                None => {}
            }
            self.call();
        }
        self.call();
        match message {
            Message::Stop { base, .. } => {
                let next = self.ring.base();
                drop(self);
                base.change(|base| *base = Some(next));
                true
            }
            Message::Start(_, outcome) => {
                outcome.change(|outcome| *outcome = Some(Ok(())));
                true
            }
            Message::Call => true,
            Message::End => false,
        }
    }

    /// Ready when the driver has kicked.
    fn kick(&self) -> LocalBoxFuture<'static, ()> {
        match (self.is_broken, self.start.kick.clone()) {
            (true, _) => pending().boxed_local(),
            (false, None) => rt::sleep(LOOK_PAUSE).boxed_local(),
            (false, Some(kick)) => async move {
                if let Err(error) = kick.wait().await {
                    tracing::warn!(%error, "a ring can't be kicked any more");
                    pending::<()>().await;
                }
            }
            .boxed_local(),
        }
    }

    fn has_room(&self) -> bool {
        self.bytes < MAX_BYTES_IN_FLIGHT
    }

    /// Takes the available requests and begins them. True: there was something.
    fn take(&mut self, disk: &Disk) -> bool {
        let mut memory = None;
        let mut chains = self.begin_left(disk);
        let any_left = chains > 0;
        while !self.is_broken && self.has_room() && self.left.is_empty() && chains < MAX_CHAINS_AT_ONCE {
            chains += 1;
            match self.ring.take() {
                Ok(None) => break,
                Ok(Some(head)) => {
                    let memory = memory.get_or_insert_with(|| Arc::clone(&lock(&self.start.memory)));
                    if let Some(inflight) = &mut self.inflight {
                        inflight.begin(head);
                    }
                    let memory = Arc::clone(memory);
                    self.begin(disk, &memory, head);
                }
                Err(error) => self.fail(error),
            }
        }
        if memory.is_some() {
            rt::note_request();
        }
        memory.is_some() || any_left
    }

    /// Begins requests of an earlier life, as far as there is room; their number.
    fn begin_left(&mut self, disk: &Disk) -> usize {
        let mut begun = 0;
        while begun < MAX_CHAINS_AT_ONCE && !self.is_broken && self.has_room() {
            let Some(head) = self.left.pop_front() else { break };
            let memory = Arc::clone(&lock(&self.start.memory));
            self.begin(disk, &memory, head);
            begun += 1;
        }
        begun
    }

    fn begin(&mut self, disk: &Disk, memory: &M, head: u16) {
        let mut chain = self.slots.take_chain();
        let result = self.ring.chain_into(memory, head, &mut chain);
        let ways = &self.ways;
        let limits = RequestLimits { disk_bytes: disk.size(), ..ways.limits };
        let request = match result {
            Ok(()) => Request::parse(&chain, &limits),
            Err(error) => {
                tracing::warn!(export = &*ways.id, %error, "a request that breaks the protocol");
                Err(Status::IoError)
            }
        };
        match request {
            Ok(request) => {
                self.bytes += requests::cost(&request, &chain);
                self.slots.begin(disk, ways, chain, request);
            }
            Err(status) => {
                let ended = requests::end(&chain, status, 0, 0);
                self.slots.keep_chain(chain);
                self.give_back(ended);
                self.call();
            }
        }
    }

    /// Lets requests go on, and returns those that have ended to the driver. True: there was one.
    fn collect(&mut self) -> bool {
        let mut any = false;
        while let Some(Some(ended)) = poll_fn(|context| self.slots.poll_ended(context)).now_or_never() {
            self.give_back(ended);
            any = true;
        }
        if any {
            self.call();
        }
        any
    }

    fn give_back(&mut self, ended: Ended) {
        self.bytes -= ended.bytes;
        let ring = &mut self.ring;
        let mut give_back = |written| {
            ring.give_back(ended.head, written);
            ring.used_index()
        };
        let written = ended.written.unwrap_or(0);
        match &mut self.inflight {
            Some(inflight) if slip!("note_of_a_request_ends_before_its_place_in_the_ring") => {
                inflight.end(ended.head, || 0);
                give_back(written);
            }
            Some(inflight) => inflight.end(ended.head, || give_back(written)),
            None => {
                give_back(written);
            }
        }
        if ended.tells_loss {
            self.start.ways.ledger.told_lost();
        }
        if ended.written.is_none() {
            self.fail(Malformed { what: "a request without a place for its status, head", value: ended.head.into() });
        }
    }

    fn call(&mut self) {
        if self.ring.is_call_due() {
            self.signal();
        }
    }

    /// Calls by a new counter: requests may have ended before it came.
    fn call_owed(&mut self) {
        if self.start.line.takes_owed() {
            self.signal();
        }
    }

    fn signal(&mut self) {
        if !self.start.line.call() {
            let what = "a call counter that is full and blocks, of the ring with this many places";
            self.fail(Malformed { what, value: self.ring.size().into() });
        }
    }

    #[cold]
    fn fail(&mut self, error: Malformed) {
        if !std::mem::replace(&mut self.is_broken, true) {
            tracing::warn!(export = &*self.start.ways.id, %error, "a ring is stopped: its driver breaks the protocol");
            self.start.line.report_error();
        }
    }
}

enum News<M: Memory> {
    Told(Message<M>),
    Kicked,
    Ended(Option<Ended>),
}

impl<M: Memory> News<M> {
    fn of<A, B>(event: Either<(Message<M>, A), ((), B)>) -> News<M> {
        match event {
            Either::Left((message, _)) => News::Told(message),
            Either::Right(_) => News::Kicked,
        }
    }
}
