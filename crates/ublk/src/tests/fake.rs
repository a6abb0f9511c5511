// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A ublk driver of the tests: devices, queues and requests as the kernel has them, and the programs that use the block device.

use crate::proto::control::{ANY_DEVICE, INFO_BYTES, features};
use crate::proto::params::PARAMS_BYTES;
use crate::proto::{DeviceInfo, Params, Request, UblkState};
use cowshed_storage::signal::Watched;
use cowshed_storage::{UblkCall, UblkDevice, UblkDriver, UblkQueue, UblkShape, UblkTarget, rt};
use cowshed_types::Errno;
use rustix::io::Errno as Number;
use std::collections::{BTreeMap, VecDeque};
use std::future::Future;
use std::sync::{Arc, Mutex};

pub const ALL: u64 = features::USER_RECOVERY
    | features::USER_RECOVERY_REISSUE
    | features::UNPRIVILEGED_DEV
    | features::CMD_IOCTL_ENCODE
    | features::USER_COPY
    | features::UPDATE_SIZE;

/// A request's result for the program that has sent it, and its data.
pub type Answer = (i32, Vec<u8>);
/// A program's end of a request.
pub type Ticket = Arc<Watched<Option<Answer>>>;

/// Waits for a request.
pub fn answer(ticket: &Ticket) -> Answer {
    rt::block_on(ticket.wait(|answer| answer.clone()))
}

pub fn is_answered(ticket: &Ticket) -> bool {
    ticket.look(Option::is_some)
}

#[derive(Clone)]
struct Job {
    descriptor: [u8; 24],
    data: Vec<u8>,
    ticket: Ticket,
}

#[derive(Default)]
struct Tag {
    /// The server waits for a request.
    is_fetched: bool,
    /// The end of the wait.
    arrival: Option<i32>,
    job: Option<Job>,
}

struct Line {
    tags: Vec<Tag>,
    pending: VecDeque<Job>,
    /// Requests that the server had at once, at most.
    most_running: usize,
}

pub struct Dev {
    /// Attempts to open the char device until it is its user's.
    strange_for: u32,
    info: DeviceInfo,
    params: [u8; PARAMS_BYTES],
    is_open: bool,
    queues_open: usize,
    is_stopping: bool,
    /// Servers that there were.
    life: u32,
    lines: Vec<Line>,
    is_lost: bool,
    /// The server dies before its next answer that is an error.
    dies_at_error: bool,
}

impl Dev {
    fn new(info: DeviceInfo) -> Dev {
        let tags = || (0..info.depth).map(|_| Tag::default()).collect();
        let line = |_| Line { tags: tags(), pending: VecDeque::new(), most_running: 0 };
        let lines = (0..info.queues).map(line).collect();
        let strange_for = if info.features & features::UNPRIVILEGED_DEV != 0 { 2 } else { 0 };
        Dev {
            strange_for,
            info,
            params: [0; PARAMS_BYTES],
            is_open: false,
            queues_open: 0,
            is_stopping: false,
            life: 0,
            lines,
            is_lost: false,
            dies_at_error: false,
        }
    }

    fn is_fetched(&self) -> bool {
        self.lines.iter().flat_map(|line| &line.tags).all(|tag| tag.is_fetched)
    }

    fn is_idle(&self) -> bool {
        self.lines.iter().flat_map(|line| &line.tags).all(|tag| tag.job.is_none())
    }

    /// Gives requests to tags that wait.
    fn dispatch(&mut self) {
        if self.info.state != UblkState::Live || self.is_stopping {
            return;
        }
        for line in &mut self.lines {
            let free = line.tags.iter_mut().filter(|tag| tag.is_fetched && tag.job.is_none());
            for tag in free {
                let Some(job) = line.pending.pop_front() else { break };
                (tag.job, tag.is_fetched, tag.arrival) = (Some(job), false, Some(0));
            }
            let running = line.tags.iter().filter(|tag| tag.job.is_some()).count();
            line.most_running = line.most_running.max(running);
        }
    }

    /// Without a block device, as the kernel leaves it: no server has it.
    fn end(&mut self) {
        self.info.state = UblkState::Dead;
        self.info.process = -1;
    }

    /// Does as the kernel when the server's process has gone.
    fn lose_server(&mut self) {
        self.life += 1;
        self.is_lost = true;
        for line in &mut self.lines {
            for tag in line.tags.iter_mut().rev() {
                line.pending.extend(tag.job.take());
                *tag = Tag::default();
            }
        }
    }
}

type Action = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct FakeState {
    devices: Mutex<BTreeMap<u32, Arc<Watched<Dev>>>>,
    calls: Mutex<Vec<(UblkCall, u64)>>,
    refusals: Mutex<Vec<(UblkCall, Number)>>,
    /// Done once, before a call of that kind.
    before: Mutex<Option<(UblkCall, Action)>>,
}

/// The driver. Clones are the same one.
#[derive(Clone)]
pub struct Fake {
    known: Arc<FakeState>,
    features: u64,
}

fn errno(number: Number) -> Errno {
    Errno(number.raw_os_error())
}

impl Fake {
    pub fn new(features: u64) -> Fake {
        Fake { known: Arc::default(), features }
    }

    /// The command is refused from now on.
    pub fn refuse(&self, call: UblkCall, number: Number) {
        self.known.refusals.lock().unwrap().push((call, number));
    }

    /// Has something done before the first such call.
    pub fn before(&self, call: UblkCall, action: impl FnOnce() + Send + 'static) {
        *self.known.before.lock().unwrap() = Some((call, Box::new(action)));
    }

    pub fn refuse_nothing(&self) {
        self.known.refusals.lock().unwrap().clear();
    }

    pub fn devices(&self) -> Vec<u32> {
        self.known.devices.lock().unwrap().keys().copied().collect()
    }

    /// The commands that were given, with their values.
    pub fn calls(&self) -> Vec<(UblkCall, u64)> {
        self.known.calls.lock().unwrap().clone()
    }

    fn device(&self, number: u32) -> Result<Arc<Watched<Dev>>, Errno> {
        self.known.devices.lock().unwrap().get(&number).cloned().ok_or(errno(Number::NODEV))
    }

    pub fn info(&self, number: u32) -> DeviceInfo {
        self.device(number).unwrap().look(|dev| dev.info)
    }

    pub fn params(&self, number: u32) -> Params {
        self.device(number).unwrap().look(|dev| Params::parse(&dev.params).unwrap())
    }

    /// Changes the driver's facts about a device.
    pub fn change_info(&self, number: u32, change: impl FnOnce(&mut DeviceInfo)) {
        self.device(number).unwrap().change(|dev| change(&mut dev.info));
    }

    /// A program's request.
    pub fn send(&self, number: u32, queue: usize, request: &Request, data: Vec<u8>) -> Ticket {
        self.send_bytes(number, queue, request.bytes(), data)
    }

    pub fn send_bytes(&self, number: u32, queue: usize, descriptor: [u8; 24], data: Vec<u8>) -> Ticket {
        let ticket = Ticket::default();
        let job = Job { descriptor, data, ticket: Arc::clone(&ticket) };
        self.device(number).unwrap().change(|dev| {
            dev.lines[queue].pending.push_back(job);
            dev.dispatch();
        });
        ticket
    }

    /// Waits until the server has this many requests of a queue.
    pub fn wait_running(&self, number: u32, queue: usize, count: usize) {
        let dev = self.device(number).unwrap();
        let running = |dev: &Dev| {
            let taken = dev.lines[queue].tags.iter().filter(|tag| tag.job.is_some() && tag.arrival.is_none());
            taken.count() == count
        };
        rt::block_on(dev.wait(|dev| running(dev).then_some(())));
    }

    pub fn most_running(&self, number: u32, queue: usize) -> usize {
        self.device(number).unwrap().look(|dev| dev.lines[queue].most_running)
    }

    /// The server's process dies: results that come from now on are lost.
    pub fn kill(&self, number: u32) {
        self.device(number).unwrap().change(Dev::lose_server);
    }

    /// A process keeps the char device open.
    pub fn hold(&self, number: u32) -> FakeDevice {
        self.open(number).unwrap_or_else(|errno| panic!("error {}", errno.0))
    }

    /// The server's process dies before its next answer that is an error.
    pub fn kill_at_error(&self, number: u32) {
        self.device(number).unwrap().change(|dev| dev.dies_at_error = true);
    }

    /// Waits until the char device isn't open any more.
    pub fn wait_closed(&self, number: u32) {
        let dev = self.device(number).unwrap();
        rt::block_on(dev.wait(|dev| (!dev.is_open && dev.queues_open == 0).then_some(())));
    }

    fn add(&self, buffer: &mut [u8]) -> Result<(), Errno> {
        let bytes: &mut [u8; INFO_BYTES] = buffer.try_into().map_err(|_| errno(Number::INVAL))?;
        let mut info = DeviceInfo::parse(bytes).map_err(|_| errno(Number::INVAL))?;
        let mut devices = self.known.devices.lock().unwrap();
        match info.device {
            ANY_DEVICE => info.device = (0..).find(|number| !devices.contains_key(number)).unwrap(),
            number if devices.contains_key(&number) => return Err(errno(Number::EXIST)),
            _ => {}
        }
        info.features &= self.features;
        // The kernel takes no recovery from users.
        if info.features & features::UNPRIVILEGED_DEV != 0 {
            info.features &= !(features::USER_RECOVERY | features::USER_RECOVERY_REISSUE);
        }
        info.state = UblkState::Dead;
        // As many as a machine with two processors has.
        info.queues = info.queues.min(2);
        devices.insert(info.device, Arc::new(Watched::new(Dev::new(info))));
        *bytes = info.bytes();
        Ok(())
    }

    fn carry_out(&self, call: UblkCall, target: UblkTarget, buffer: &mut [u8]) -> Result<(), Errno> {
        let invalid = errno(Number::INVAL);
        match call {
            UblkCall::GetFeatures => {
                buffer.copy_from_slice(&self.features.to_ne_bytes());
                return Ok(());
            }
            UblkCall::AddDevice => return self.add(buffer),
            _ => {}
        }
        let dev = self.device(target.device)?;
        let is_users = dev.look(|dev| dev.info.features & features::UNPRIVILEGED_DEV != 0);
        if is_users && dev.look(|dev| dev.strange_for > 0) {
            return Err(errno(Number::ACCESS));
        }
        let path = format!("/dev/ublkc{}\0", target.device);
        let (named, payload) = buffer.split_at_mut(target.path_bytes.into());
        if named != path.as_bytes() && (is_users || call == UblkCall::GetInfo) {
            return Err(invalid);
        }
        assert!(named.is_empty() || is_users || call == UblkCall::GetInfo, "the path is taken for the payload");
        let server = target.value == u64::from(std::process::id());
        match call {
            UblkCall::SetParams => {
                let bytes: &[u8; PARAMS_BYTES] = (&*payload).try_into().map_err(|_| invalid)?;
                let params = Params::parse(bytes).map_err(|_| invalid)?;
                let most = dev.look(|dev| dev.info.max_request_bytes);
                if params.sectors == 0 || params.max_request_bytes > most {
                    return Err(invalid);
                }
                dev.change(|dev| dev.params = *bytes);
            }
            UblkCall::GetParams => payload.copy_from_slice(&dev.look(|dev| dev.params)),
            UblkCall::GetInfo => payload.copy_from_slice(&dev.look(|dev| dev.info.bytes())),
            UblkCall::StartDevice | UblkCall::EndRecovery if !server => return Err(invalid),
            UblkCall::StartDevice | UblkCall::EndRecovery => {
                rt::block_on(dev.wait(|dev| dev.is_fetched().then_some(())));
                dev.change(|dev| {
                    dev.info.state = UblkState::Live;
                    dev.info.process = std::process::id().cast_signed();
                    dev.is_lost = false;
                    dev.dispatch();
                });
            }
            UblkCall::StopDevice => {
                dev.change(|dev| dev.is_stopping = true);
                rt::block_on(dev.wait(|dev| (dev.is_idle() || dev.info.state != UblkState::Live).then_some(())));
                dev.change(|dev| {
                    dev.end();
                    for line in &mut dev.lines {
                        let left = std::mem::take(&mut line.pending);
                        let end = |job: Job| job.ticket.change(|answer| *answer = Some((-5, Vec::new())));
                        left.into_iter().for_each(end);
                        line.tags.iter_mut().for_each(|tag| tag.arrival = Some(-19));
                    }
                });
            }
            UblkCall::DeleteDevice => {
                rt::block_on(dev.wait(|dev| (!dev.is_open && dev.queues_open == 0).then_some(())));
                self.known.devices.lock().unwrap().remove(&target.device);
            }
            UblkCall::StartRecovery => {
                let is_ready =
                    dev.look(|dev| !dev.is_open && dev.queues_open == 0 && dev.info.state == UblkState::Quiesced);
                return if is_ready { Ok(()) } else { Err(errno(Number::BUSY)) };
            }
            UblkCall::UpdateSize => {
                let params = self.params(target.device);
                let params = Params { sectors: target.value, ..params };
                dev.change(|dev| dev.params = params.bytes());
            }
            UblkCall::GetFeatures | UblkCall::AddDevice => {}
        }
        Ok(())
    }
}

impl UblkDriver for Fake {
    type Device = FakeDevice;

    fn call(&self, call: UblkCall, target: UblkTarget, buffer: &mut [u8]) -> Result<(), Errno> {
        let refused = self.known.refusals.lock().unwrap().iter().find(|(refused, _)| *refused == call).copied();
        self.known.calls.lock().unwrap().push((call, target.value));
        let action = self.known.before.lock().unwrap().take_if(|(awaited, _)| *awaited == call);
        if let Some((_, action)) = action {
            action();
        }
        match refused {
            Some((_, number)) => Err(errno(number)),
            None => self.carry_out(call, target, buffer),
        }
    }

    fn open(&self, device: u32) -> Result<FakeDevice, Errno> {
        let dev = self.device(device)?;
        // As a rule of udev, it comes a moment later.
        let is_strange = dev.change(|dev| {
            let before = dev.strange_for;
            dev.strange_for = before.saturating_sub(1);
            before > 0
        });
        if is_strange {
            return Err(errno(Number::ACCESS));
        }
        let is_free = dev.change(|dev| !std::mem::replace(&mut dev.is_open, true) && dev.queues_open == 0);
        if is_free { Ok(FakeDevice(dev)) } else { Err(errno(Number::BUSY)) }
    }
}

pub struct FakeDevice(Arc<Watched<Dev>>);

impl Drop for FakeDevice {
    fn drop(&mut self) {
        self.0.change(|dev| {
            dev.is_open = false;
            note_closed(dev);
        });
    }
}

fn note_closed(dev: &mut Dev) {
    if dev.is_lost && dev.queues_open == 0 && !dev.is_open && dev.info.state == UblkState::Live {
        if dev.info.features & features::USER_RECOVERY != 0 {
            dev.info.state = UblkState::Quiesced;
            return;
        }
        dev.end();
        for job in dev.lines.iter_mut().flat_map(|line| std::mem::take(&mut line.pending)) {
            job.ticket.change(|answer| *answer = Some((-5, Vec::new())));
        }
    }
}

impl UblkDevice for FakeDevice {
    type Queue = FakeQueue;

    fn queue(&self, shape: UblkShape) -> Result<FakeQueue, Errno> {
        let life = self.0.change(|dev| {
            dev.queues_open += 1;
            let copies = dev.info.features & features::USER_COPY != 0;
            assert_eq!(shape.buffer_bytes, (!copies).then_some(dev.info.max_request_bytes));
            assert_eq!(shape.depth, dev.info.depth);
            dev.life
        });
        Ok(FakeQueue { dev: Arc::clone(&self.0), line: shape.queue.into(), life })
    }
}

pub struct FakeQueue {
    dev: Arc<Watched<Dev>>,
    line: usize,
    life: u32,
}

impl Drop for FakeQueue {
    fn drop(&mut self) {
        self.dev.change(|dev| {
            dev.queues_open -= 1;
            note_closed(dev);
        });
    }
}

impl FakeQueue {
    async fn wait(&self, tag: u16) -> i32 {
        let (line, life) = (self.line, self.life);
        let arrived = move |dev: &mut Dev| match dev.life == life {
            true => dev.lines[line].tags[usize::from(tag)].arrival.take(),
            false => Some(-19),
        };
        self.dev.wait(arrived).await
    }

    /// With the job of a tag, where this server is alive.
    fn with_job<R>(&self, tag: u16, look: impl FnOnce(&mut Job) -> R) -> Result<R, Errno> {
        self.dev.change(|dev| {
            if dev.life != self.life {
                return Err(errno(Number::NODEV));
            }
            let job = dev.lines[self.line].tags[usize::from(tag)].job.as_mut();
            Ok(look(job.expect("the server has a request")))
        })
    }
}

impl UblkQueue for FakeQueue {
    fn fetch(&self, tag: u16) -> impl Future<Output = i32> {
        self.dev.change(|dev| {
            if dev.life == self.life {
                let tag = &mut dev.lines[self.line].tags[usize::from(tag)];
                assert!(!std::mem::replace(&mut tag.is_fetched, true), "fetched twice");
                dev.dispatch();
            }
        });
        self.wait(tag)
    }

    fn commit(&self, tag: u16, result: i32) -> impl Future<Output = i32> {
        self.dev.change(|dev| {
            if dev.life == self.life && result < 0 && std::mem::take(&mut dev.dies_at_error) {
                dev.lose_server();
            }
            if dev.life == self.life {
                let tag = &mut dev.lines[self.line].tags[usize::from(tag)];
                let job = tag.job.take().expect("the server has a request");
                tag.is_fetched = true;
                assert!(result != -19, "that gives the request up");
                job.ticket.change(|answer| {
                    assert!(answer.is_none(), "answered twice");
                    *answer = Some((result, job.data));
                });
                dev.dispatch();
            }
        });
        self.wait(tag)
    }

    fn descriptor(&self, tag: u16) -> [u8; 24] {
        self.with_job(tag, |job| job.descriptor).unwrap_or([0; 24])
    }

    fn take(&self, tag: u16, at: u32, data: &mut [u8]) -> Result<(), Errno> {
        let at = at as usize;
        self.with_job(tag, |job| data.copy_from_slice(&job.data[at..at + data.len()]))
    }

    fn give(&self, tag: u16, at: u32, data: &[u8]) -> Result<(), Errno> {
        let at = at as usize;
        self.with_job(tag, |job| {
            let end = at + data.len();
            job.data.resize(job.data.len().max(end), 0);
            job.data[at..end].copy_from_slice(data);
        })
    }
}
