// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The device: its coming, its takeover from a server that has died, its going.

use crate::config::{Config, Recover};
use crate::ledger::DeviceLedger;
use crate::queue::{self, QueueSettings};
use crate::requests::DeviceRules;
use cowshed_image::Node;
use cowshed_image::graph::Attachment;
use cowshed_storage::rt;
use cowshed_storage::signal::Watched;
use cowshed_storage::{UBLK_CONTROL, UblkCall, UblkControl, UblkDriver, UblkShape, UblkTarget};
use cowshed_types::{Errno, Error, ErrorKind, Result};
use cowshed_ublk_proto::control::{ANY_DEVICE, INFO_BYTES, features};
use cowshed_ublk_proto::params::PARAMS_BYTES;
use cowshed_ublk_proto::{DeviceInfo, Limits, MAX_DEPTH, MAX_QUEUES, Params, SECTOR_BYTES, UblkState};
use rustix::io::Errno as Number;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The longest data of a request of a new device, in bytes.
const NEW_REQUEST_BYTES: u32 = 1 << 20;
/// So long a char device may take to appear, and to get its mode by a rule.
const NODE_PATIENCE: Duration = Duration::from_secs(5);
/// So long the kernel may take to end the requests of a dead server.
const DEATH_PATIENCE: Duration = Duration::from_secs(30);
/// The same, where the server seems to be alive: it may be about to end.
const DYING_PATIENCE: Duration = Duration::from_secs(2);
const PAUSE: Duration = Duration::from_millis(20);
/// The features that every device of ours has.
const NEEDED: u64 = features::USER_RECOVERY | features::USER_RECOVERY_REISSUE | features::CMD_IOCTL_ENCODE;
/// In the driver's note of a device of ours, above the name of its export.
const MARK: u64 = 0xc057 << 48;

/// Opens the control device of the kernel's driver.
///
/// # Errors
/// A missing driver, or no right to use it; the message names the remedy.
pub fn open_driver() -> Result<UblkControl> {
    UblkControl::open().map_err(|Errno(number)| {
        let is = |number_of: Number| number == number_of.raw_os_error();
        if is(Number::NOENT) || is(Number::NODEV) || is(Number::NXIO) {
            let message = format!(
                "the kernel's ublk driver is not there ({UBLK_CONTROL}): load it by 'modprobe ublk_drv', as root"
            );
            return Error::new(ErrorKind::NotFound, message);
        }
        if is(Number::ACCESS) || is(Number::PERM) {
            return no_permission();
        }
        if is(Number::NOSYS) {
            return Error::unsupported("an export of the type 'ublk' needs io_uring, which is not to be had here");
        }
        Error::os(Errno(number), format!("could not open {UBLK_CONTROL}"))
    })
}

fn no_permission() -> Error {
    let message = "no permission for ublk devices: they are root's. Others need 'unprivileged=on', and a rule of udev that gives \
                   them /dev/ublk-control and their devices";
    Error::new(ErrorKind::PermissionDenied, message)
}

/// The driver's note for a name: the 64-bit FNV-1a hash, without its upper bits.
fn note_of(id: &str) -> u64 {
    let hash = id
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    MARK | (hash & !(0xffff << 48))
}

/// The grain of the disk's allocation, where it is a power of two that a request can have.
fn grain_bytes(node: &Node) -> Option<u32> {
    let grain = node.subcluster_bytes().or_else(|| node.cluster_bytes())?;
    u32::try_from(grain).ok().filter(|grain| grain.is_power_of_two() && *grain <= NEW_REQUEST_BYTES)
}

/// Sectors of a disk: whole blocks alone.
fn sectors(size: u64, block_bytes: u32) -> u64 {
    size / u64::from(block_bytes) * (u64::from(block_bytes) / SECTOR_BYTES)
}

/// A device that this process serves.
pub(crate) struct Device<D: UblkDriver> {
    driver: D,
    pub number: u32,
    features: u64,
    params: Params,
    common: QueueSettings,
}

/// Gives commands about one device.
struct Calls<'a, D> {
    driver: &'a D,
    device: u32,
    /// Commands begin with the path of the char device, whose owner the driver checks.
    with_path: bool,
}

impl<D: UblkDriver> Calls<'_, D> {
    fn call(&self, call: UblkCall, value: u64, payload: &mut [u8]) -> std::result::Result<(), Errno> {
        let names_path = self.with_path || call == UblkCall::GetInfo;
        let path = if names_path { format!("/dev/ublkc{}\0", self.device) } else { String::new() };
        let mut buffer = [path.as_bytes(), payload].concat();
        let path_bytes = path.len() as u16;
        let target = UblkTarget { device: self.device, value, path_bytes };
        self.driver.call(call, target, &mut buffer)?;
        payload.copy_from_slice(&buffer[path.len()..]);
        Ok(())
    }

    fn order(&self, call: UblkCall, value: u64) -> std::result::Result<(), Errno> {
        self.call(call, value, &mut [])
    }

    fn info(&self) -> std::result::Result<DeviceInfo, Failure> {
        let mut bytes = [0; INFO_BYTES];
        self.call(UblkCall::GetInfo, 0, &mut bytes).map_err(Failure::Driver)?;
        DeviceInfo::parse(&bytes).map_err(|error| Failure::Other(error.to_string()))
    }

    fn params(&self) -> std::result::Result<Params, Failure> {
        let mut bytes: [u8; PARAMS_BYTES] = Params::question();
        self.call(UblkCall::GetParams, 0, &mut bytes).map_err(Failure::Driver)?;
        Params::parse(&bytes).map_err(|error| Failure::Other(error.to_string()))
    }
}

enum Failure {
    Driver(Errno),
    Other(String),
}

impl Failure {
    fn is(&self, number: Number) -> bool {
        matches!(self, Failure::Driver(errno) if errno.0 == number.raw_os_error())
    }

    fn worded(self, doing: &str) -> Error {
        match self {
            Failure::Driver(Errno(number))
                if number == Number::PERM.raw_os_error() || number == Number::ACCESS.raw_os_error() =>
            {
                no_permission()
            }
            Failure::Driver(errno) => Error::os(errno, doing),
            Failure::Other(message) => Error::internal(format!("{doing}: {message}")),
        }
    }
}

fn worded(doing: &str) -> impl FnOnce(Errno) -> Error {
    move |errno| Failure::Driver(errno).worded(doing)
}

/// The features of the driver.
fn driver_features(driver: &impl UblkDriver, unprivileged: bool) -> Result<u64> {
    let mut bytes = [0; 8];
    let target = UblkTarget { device: ANY_DEVICE, value: 0, path_bytes: 0 };
    let known = match driver.call(UblkCall::GetFeatures, target, &mut bytes) {
        Ok(()) => u64::from_ne_bytes(bytes),
        Err(errno @ Errno(number)) => {
            let denied = [Number::PERM, Number::ACCESS].iter().any(|denied| denied.raw_os_error() == number);
            return Err(if denied { no_permission() } else { too_old(&format!("it gives error {}", errno.0)) });
        }
    };
    let wanted = NEEDED | if unprivileged { features::UNPRIVILEGED_DEV } else { features::USER_COPY };
    match wanted & !known {
        0 => Ok(known),
        missing => Err(too_old(&format!("its features {known:#x} lack {missing:#x}"))),
    }
}

fn too_old(why: &str) -> Error {
    Error::unsupported(format!("the kernel's ublk driver is too old, and that of Linux 6.5 or newer is needed: {why}"))
}

/// Whether a process runs. A process that has ended, and whose parent hasn't looked yet, doesn't run.
fn is_alive(process: i32) -> bool {
    // `stat` would wait for an execve(2) of the process, and that may wait for this device.
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
    let state = status.lines().find_map(|line| line.strip_prefix("State:"));
    state.is_some_and(|state| !state.trim_start().starts_with(['Z', 'X']))
}

impl<D: UblkDriver> Device<D> {
    /// Makes a device, or takes it over, and serves it.
    pub fn start(
        driver: D,
        config: &Config,
        attachment: &Arc<Attachment>,
        on_end: Arc<dyn Fn() + Send + Sync>,
    ) -> Result<Device<D>> {
        let known = driver_features(&driver, config.unprivileged)?;
        if let (Recover::On | Recover::Auto, Some(number)) = (config.recover, config.device) {
            let calls = Calls { driver: &driver, device: number, with_path: config.unprivileged };
            match calls.info() {
                Ok(info) if config.recover == Recover::Auto && is_own(config, &info) => {
                    match outlived(&driver, &calls, info)? {
                        true => {
                            let deleted = calls.order(UblkCall::DeleteDevice, 0);
                            deleted
                                .map_err(worded("could not delete the ublk device that has ended with its server"))?;
                        }
                        false => return Self::take_over(driver, config, attachment, on_end, info),
                    }
                }
                Ok(info) => return Self::take_over(driver, config, attachment, on_end, info),
                Err(failure) if failure.is(Number::NODEV) && config.recover == Recover::Auto => {}
                Err(failure) if failure.is(Number::NODEV) => {
                    let message =
                        format!("there is no ublk device {number} to take over; 'recover=auto' makes one then");
                    return Err(Error::new(ErrorKind::NotFound, message));
                }
                Err(failure) => return Err(failure.worded("could not look at the ublk device")),
            }
        }
        Self::make(driver, config, attachment, on_end, known)
    }

    fn make(
        driver: D,
        config: &Config,
        attachment: &Arc<Attachment>,
        on_end: Arc<dyn Fn() + Send + Sync>,
        known: u64,
    ) -> Result<Device<D>> {
        let copies = if config.unprivileged { features::UNPRIVILEGED_DEV } else { features::USER_COPY };
        let wanted = DeviceInfo {
            // The check has seen to the ranges.
            queues: u16::try_from(config.queues).unwrap_or(MAX_QUEUES),
            depth: u16::try_from(config.depth).unwrap_or(MAX_DEPTH),
            state: UblkState::Dead,
            max_request_bytes: NEW_REQUEST_BYTES,
            device: config.device.unwrap_or(ANY_DEVICE),
            process: std::process::id().cast_signed(),
            features: NEEDED | copies | (known & features::UPDATE_SIZE),
            note: note_of(&config.id),
            owner: 0,
        };
        let params = Params {
            sectors: sectors(attachment.size(), config.block_bytes),
            read_only: !config.writable,
            has_cache: config.writable && !config.writethrough,
            block_bytes: config.block_bytes,
            grain_bytes: grain_bytes(&attachment.node()).unwrap_or(config.block_bytes),
            max_request_bytes: NEW_REQUEST_BYTES,
            discards: config.writable,
        };
        if params.sectors == 0 {
            let message = format!("a block device has at least one block of {} bytes", config.block_bytes);
            return Err(Error::invalid_argument(message).value(attachment.size()));
        }
        let mut bytes = wanted.bytes();
        let target = UblkTarget { device: wanted.device, value: 0, path_bytes: 0 };
        driver.call(UblkCall::AddDevice, target, &mut bytes).map_err(|errno| {
            let is_there = errno.0 == Number::EXIST.raw_os_error();
            match config.device {
                Some(number) if is_there => {
                    let message = format!(
                        "there is a ublk device {number} already; where its server has died, 'recover=on' takes it over"
                    );
                    Error::new(ErrorKind::Busy, message)
                }
                _ => worded("could not make a ublk device")(errno),
            }
        })?;
        let info = DeviceInfo::parse(&bytes);
        // By the number alone it can be taken away again.
        let number =
            info.map_or_else(|_| u32::from_ne_bytes([bytes[12], bytes[13], bytes[14], bytes[15]]), |i| i.device);
        let ledger = DeviceLedger::begin(&config.notes, number);
        let common = Self::common(config, attachment, on_end, ledger, params);
        let mut device = Device { driver, number, features: info.map_or(0, |info| info.features), params, common };
        let started = info.map_err(|error| Error::internal(format!("the ublk driver gives a wrong answer: {error}")));
        match started.and_then(|info| device.run_new(config, &info)) {
            Ok(()) => {
                // The disk may have another size than when the kernel was told of it.
                device.look_at_size();
                Ok(device)
            }
            Err(error) => {
                device.stop();
                Err(error)
            }
        }
    }

    fn common(
        config: &Config,
        attachment: &Arc<Attachment>,
        on_end: Arc<dyn Fn() + Send + Sync>,
        ledger: DeviceLedger,
        params: Params,
    ) -> QueueSettings {
        QueueSettings {
            ways: DeviceRules {
                id: config.id.as_str().into(),
                writethrough: config.writethrough,
                ledger: Arc::new(ledger),
            },
            limits: Limits {
                max_request_bytes: params.max_request_bytes,
                block_bytes: params.block_bytes,
                writable: config.writable,
            },
            attachment: Arc::clone(attachment),
            poll_limit: config.poll_limit.clone(),
            threads: Arc::new(Watched::default()),
            on_end,
        }
    }

    fn calls(&self) -> Calls<'_, D> {
        let with_path = self.features & features::UNPRIVILEGED_DEV != 0;
        Calls { driver: &self.driver, device: self.number, with_path }
    }

    fn run_new(&mut self, config: &Config, info: &DeviceInfo) -> Result<()> {
        let is_larger = u64::from(info.queues) > config.queues || u64::from(info.depth) > config.depth;
        if is_larger || info.max_request_bytes < NEW_REQUEST_BYTES {
            return Err(Error::internal("the ublk driver gives another device than it was asked for"));
        }
        // A user's commands work from the time on when the char device is that user's.
        let opened = self.open()?;
        let mut bytes = self.params.bytes();
        let set = self.calls().call(UblkCall::SetParams, 0, &mut bytes);
        set.map_err(worded("the ublk driver refuses the parameters of the device"))?;
        self.start_queues(&opened, info)?;
        drop(opened);
        let process = u64::from(std::process::id());
        self.calls().order(UblkCall::StartDevice, process).map_err(worded("could not start the ublk device"))?;
        Ok(())
    }

    /// Opens the char device, which appears after a moment, and gets its owner after another one.
    fn open(&self) -> Result<Arc<D::Device>> {
        let end = Instant::now() + NODE_PATIENCE;
        loop {
            let number = match self.driver.open(self.number) {
                Ok(device) => return Ok(Arc::new(device)),
                Err(Errno(number)) => number,
            };
            let is_denied = number == Number::ACCESS.raw_os_error();
            if !is_denied && number != Number::NOENT.raw_os_error() {
                return Err(worded(&format!("could not open /dev/ublkc{}", self.number))(Errno(number)));
            }
            if Instant::now() > end {
                let path = format!("/dev/ublkc{}", self.number);
                return Err(match is_denied && self.features & features::UNPRIVILEGED_DEV != 0 {
                    true => Error::new(
                        ErrorKind::PermissionDenied,
                        format!(
                            "{path} does not become this user's, which takes a rule of udev; root may delete the device"
                        ),
                    ),
                    false => worded(&format!("could not open {path}"))(Errno(number)),
                });
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// Has each queue's thread fetch its requests.
    fn start_queues(&self, device: &Arc<D::Device>, info: &DeviceInfo) -> Result<()> {
        let buffer_bytes = (info.features & features::USER_COPY == 0).then_some(info.max_request_bytes);
        let (prepared, are_prepared) = std::sync::mpsc::sync_channel(info.queues.into());
        for queue in 0..info.queues {
            let shape = UblkShape { queue, depth: info.depth.min(MAX_DEPTH), buffer_bytes };
            queue::spawn(device, &self.common, shape, prepared.clone())?;
        }
        drop(prepared);
        for _ in 0..info.queues {
            are_prepared.recv().unwrap_or_else(|_| Err(Error::internal("a thread of an export ended at once")))?;
        }
        Ok(())
    }

    fn take_over(
        driver: D,
        config: &Config,
        attachment: &Arc<Attachment>,
        on_end: Arc<dyn Fn() + Send + Sync>,
        info: DeviceInfo,
    ) -> Result<Device<D>> {
        let number = info.device;
        let calls =
            Calls { driver: &driver, device: number, with_path: info.features & features::UNPRIVILEGED_DEV != 0 };
        let params = calls.params().map_err(|failure| failure.worded("could not look at the ublk device"))?;
        check_takeover(config, &info, &params, attachment.size())?;
        // The kernel lets go of a process only when its requests have ended.
        let begin = Instant::now();
        loop {
            match calls.order(UblkCall::StartRecovery, 0) {
                Ok(()) => break,
                Err(errno) if errno.0 != Number::BUSY.raw_os_error() => {
                    return Err(worded("could not take over the ublk device")(errno));
                }
                Err(_) if begin.elapsed() > patience(&calls, &info) => return Err(still_served(&info)),
                Err(_) => std::thread::sleep(PAUSE),
            }
        }
        let ledger = DeviceLedger::take_up(&config.notes, number);
        if ledger.is_lost() {
            tracing::warn!(
                export = config.id,
                device = number,
                "changes may be lost that the last server of the device had told of: flushes will fail until the device is made anew"
            );
        }
        let common = Self::common(config, attachment, on_end, ledger, params);
        let mut device = Device { driver, number, features: info.features, params, common };
        // The device goes on to wait for a server where this fails.
        let opened = device.open()?;
        device.start_queues(&opened, &info)?;
        drop(opened);
        let process = u64::from(std::process::id());
        device.calls().order(UblkCall::EndRecovery, process).map_err(worded("could not take over the ublk device"))?;
        device.look_at_size();
        Ok(device)
    }

    /// The size of the disk may have changed: the kernel hears of it.
    pub fn look_at_size(&mut self) {
        let sectors = sectors(self.common.attachment.size(), self.params.block_bytes);
        if sectors == self.params.sectors {
            return;
        }
        let (id, device) = (&*self.common.ways.id, self.number);
        if self.features & features::UPDATE_SIZE == 0 {
            tracing::warn!(
                export = id,
                device,
                "the kernel's ublk driver can't change the length of a device, as that of Linux 6.16 can"
            );
            return;
        }
        match self.calls().order(UblkCall::UpdateSize, sectors) {
            Ok(()) => self.params.sectors = sectors,
            Err(errno) => tracing::warn!(export = id, device, errno = errno.0, "the ublk driver refuses a new length"),
        }
    }

    /// True where no queue is served any more.
    pub fn has_ended(&self) -> bool {
        self.common.threads.look(|threads| *threads == 0)
    }

    /// Ends requests in flight, and takes the device away.
    pub fn stop(&mut self) {
        let (id, device) = (Arc::clone(&self.common.ways.id), self.number);
        let gone = |errno: &Errno| errno.0 == Number::NODEV.raw_os_error();
        // A device that was never started has its fetched requests given back.
        match self.calls().order(UblkCall::StopDevice, 0) {
            Err(errno) if !gone(&errno) => {
                tracing::warn!(export = &*id, device, errno = errno.0, "the ublk driver doesn't stop a device");
            }
            _ => {}
        }
        rt::block_on(self.common.threads.wait(|threads| (*threads == 0).then_some(())));
        match self.calls().order(UblkCall::DeleteDevice, 0) {
            Err(errno) if !gone(&errno) => {
                tracing::warn!(export = &*id, device, errno = errno.0, "the ublk driver doesn't delete a device");
            }
            _ => {}
        }
        self.common.ways.ledger.end();
    }
}

fn still_served(info: &DeviceInfo) -> Error {
    let message = format!("the ublk device {} is served by process {}", info.device, info.process);
    Error::new(ErrorKind::Busy, message)
}

/// The time limit for the end of a device's last server: short where it seems to be alive.
fn patience<D: UblkDriver>(calls: &Calls<'_, D>, before: &DeviceInfo) -> Duration {
    let now = calls.info().unwrap_or(*before);
    match matches!(now.state, UblkState::Live | UblkState::Dead) && is_alive(now.process) {
        true => DYING_PATIENCE,
        false => DEATH_PATIENCE,
    }
}

/// The export's own device.
fn is_own(config: &Config, info: &DeviceInfo) -> bool {
    info.note == note_of(&config.id)
}

/// Its server has made the device and has not started it yet. The kernel gives a device that was stopped no process.
fn is_starting(info: &DeviceInfo) -> bool {
    info.state == UblkState::Dead && is_alive(info.process)
}

/// True where the device has ended and is only in the way of the next one. The kernel stops a user's device a moment after
/// its server has died. False: it waits for a server.
///
/// # Errors
/// A server has it.
fn outlived<D: UblkDriver>(driver: &D, calls: &Calls<'_, D>, mut info: DeviceInfo) -> Result<bool> {
    let begin = Instant::now();
    let waits = |info: &DeviceInfo| match info.features & features::USER_RECOVERY {
        0 => info.state != UblkState::Dead || is_starting(info),
        _ => is_starting(info),
    };
    while waits(&info) {
        if begin.elapsed() > patience(calls, &info) {
            return Err(still_served(&info));
        }
        std::thread::sleep(PAUSE);
        info = calls.info().unwrap_or(info);
    }
    if info.state != UblkState::Dead {
        return Ok(false);
    }
    // The driver deletes a device when it isn't open any more, and waits for that without end.
    while let Err(Errno(number)) = driver.open(info.device) {
        if number != Number::BUSY.raw_os_error() {
            break;
        }
        if begin.elapsed() > DYING_PATIENCE {
            let message = format!("the ublk device {} has ended, and another process has it open", info.device);
            return Err(Error::new(ErrorKind::Busy, message));
        }
        std::thread::sleep(PAUSE);
    }
    Ok(true)
}

/// Refuses a device whose last server has promised more than the next one can keep.
fn check_takeover(config: &Config, info: &DeviceInfo, params: &Params, size: u64) -> Result<()> {
    let number = info.device;
    let refused =
        |why: String| Err(Error::invalid_argument(format!("the ublk device {number} can't be taken over: {why}")));
    if !is_own(config, info) {
        return refused(format!("no export with the id '{}' has made it", config.id));
    }
    if is_starting(info) {
        return Err(still_served(info));
    }
    if info.features & features::UNPRIVILEGED_DEV != 0 && info.features & features::USER_RECOVERY == 0 {
        return refused("the kernel ends a user's device with its server; 'recover=auto' makes it anew".to_owned());
    }
    if info.features & NEEDED != NEEDED || info.state == UblkState::Dead {
        return refused("it was stopped".to_owned());
    }
    if params.read_only == config.writable {
        return refused(format!("it is {}", if params.read_only { "read-only" } else { "writable" }));
    }
    if config.writable && !params.has_cache && !config.writethrough {
        return refused("each of its changes is durable at once, which takes 'writethrough=on'".to_owned());
    }
    let (own, known) = (sectors(size, params.block_bytes), params.sectors);
    if own < known && info.features & features::UPDATE_SIZE == 0 {
        return refused(format!("it has {known} sectors, and the disk has {own}"));
    }
    Ok(())
}
