// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `share`: one disk for download, under a URL that can't be guessed.
//!
//! - `contents`: the disk, a qcow2 file of it that is made while it is read, the page
//! - `downloads`: the parts of the disk that clients have
//! - `page`: the page's text

mod contents;
mod downloads;
mod page;

use super::arguments::{FaultArgs, NamingArgs, one_file};
use super::{Verb, work};
use crate::output::{Console, Failure};
use clap::{ArgMatches, Args, FromArgMatches, ValueEnum};
use contents::{PackedContent, Page, Raw, Shown};
use cowshed_codec::Codec;
use cowshed_http_server::proto::answer::percent_encoded;
use cowshed_http_server::{Content, Event, EventHandler, Limits, Packing, Server, ServerConfig};
use cowshed_image::graph::{AttachRequest, Attachment, nodes_below};
use cowshed_image::options::BlockdevOptions;
use cowshed_jobs::{ImageSpec, JobHandle};
use cowshed_nbd::ServerTls;
use cowshed_storage::{File, IoBuf, SocketAddress, path_of_text, rt};
use cowshed_types::{Error, Result as BlockResult};
use downloads::Downloads;
use page::Facts;
use sha2::{Digest, Sha256};
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

pub const VERB: Verb = Verb {
    name: "share",
    about: "Offer a disk for download, under one URL that can't be guessed",
    operands: "FILE",
    details: "It prints the URL, and serves the disk from there until Ctrl-C, the end of --expires, or with --once the first \
              complete download. The URL leads a browser to a page with the name, the sizes, the SHA-256 digest and the download, and curl \
              to the bytes. Nothing is stored on the way: a qcow2 file is made while it is sent. A download that broke off goes on \
              where it stopped (curl -C -), as long as nothing has written to the disk.\n\n\
              It listens on this machine only, unless --bind says otherwise. See docs/share.md.",
    examples: "  cowshed share disk.qcow2
      Prints a URL such as http://localhost:40123/5f0c…/disk.raw.
  curl -f $URL | zstd -d | dd of=/dev/sdX bs=1M oflag=direct
      From --as zstd: straight onto a disk, compressed on the way.
  cowshed share --as qcow2 --once --expires 1h --bind 0.0.0.0 --tls-dir certs disk.qcow2
      Once, within an hour, for other machines, encrypted: certs has server-cert.pem and server-key.pem.",
    in_qemu_img: false,
    arguments,
    run,
};

fn arguments(command: clap::Command) -> clap::Command {
    // A listening process can't be confined to files.
    let help = "The image may be hostile: no other file is opened on its word, and its tables have tighter limits";
    ShareArgs::augment_args(command).mut_arg("untrusted", |argument| argument.help(help))
}

/// The form in which a client gets the disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum Shape {
    /// The bytes of the disk
    #[default]
    Raw,
    /// A qcow2 file without a backing file, that holds the data alone
    Qcow2,
    /// The bytes of the disk, compressed: for zstd -d
    Zstd,
}

impl Shape {
    fn ending(self) -> &'static str {
        match self {
            Shape::Raw => "raw",
            Shape::Qcow2 => "qcow2",
            Shape::Zstd => "raw.zst",
        }
    }
}

#[derive(Args, Clone, Debug)]
struct ShareArgs {
    /// Format of FILE [default: probed]
    #[arg(short, long, value_name = "FORMAT")]
    format: Option<String>,
    #[command(flatten)]
    naming: NamingArgs,
    /// Form of the download
    #[arg(long = "as", value_enum, default_value_t, value_name = "raw|qcow2|zstd")]
    shape: Shape,
    /// Stop after the first complete download
    #[arg(long)]
    once: bool,
    /// Stop after so long: seconds, or a number with s, m, h or d
    #[arg(long, value_name = "TIME")]
    expires: Option<String>,
    /// Address to listen on [default: localhost]
    #[arg(short, long, value_name = "ADDRESS")]
    bind: Option<String>,
    /// Port to listen on [default: a free one]
    #[arg(short, long, value_name = "PORT", default_value_t = 0)]
    port: u16,
    /// Encrypt, with server-cert.pem and server-key.pem of this folder
    #[arg(long, value_name = "FOLDER", value_hint = clap::ValueHint::DirPath)]
    tls_dir: Option<PathBuf>,
    /// Name of the file that clients get [default: that of FILE with the ending of its format]
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// Compute no digest, which takes one read of the whole disk
    #[arg(long)]
    no_digest: bool,
    /// Show no progress
    #[arg(short, long)]
    quiet: bool,
    #[command(flatten)]
    faults: FaultArgs,
    /// The image
    #[arg(value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    files: Vec<String>,
}

/// The shared image's form, and the server's settings.
struct Plan {
    shape: Shape,
    once: bool,
    expires: Option<Duration>,
    address: SocketAddress,
    tls: Option<ServerTls>,
    file_name: String,
    has_digest: bool,
}

/// The longest wait for times of the image that a change moves.
const SETTLE_LIMIT: Duration = Duration::from_secs(3);

/// Between two openings of the image meanwhile.
const SETTLE_PAUSE: Duration = Duration::from_millis(30);

/// Between two looks whether it is over.
const LOOK: Duration = Duration::from_millis(100);

/// The time for which downloads may go on after the end.
const GRACE: Duration = Duration::from_secs(1);

/// The end may take so long beyond that: a read of the disk may never return.
const STOP_LIMIT: Duration = Duration::from_secs(5);

/// Fast enough for a network.
const ZSTD_LEVEL: i32 = 1;

/// Read at once, for clients and for the digest: each such piece is a frame of a zstd file. A client that takes its pieces slowly
/// holds two of them.
const PIECE_BYTES: u64 = 256 << 10;

fn run(matches: &ArgMatches, console: &mut Console) -> Result<u8, Failure> {
    let args = ShareArgs::from_arg_matches(matches)?;
    let file = one_file(&args.files)?;
    let image = args.naming.spec(file, args.format.as_ref())?;
    let faults = args.faults.options()?;
    let host = args.bind.clone().unwrap_or_else(|| "localhost".to_owned());
    if host.is_empty() {
        return Err(Failure::new("--bind is empty: it expects an address of this machine, or 0.0.0.0 for all of them"));
    }
    let tls = args.tls_dir.as_deref().map(|folder| ServerTls::from_dir(folder, false)).transpose()?;
    if tls.is_none() && !is_of_this_machine(&host) {
        let warning = format!("any host that reaches {host} can read what it is sent: --tls-dir encrypts");
        crate::output::warning::print(&warning);
    }
    let plan = Plan {
        shape: args.shape,
        once: args.once,
        expires: args.expires.as_deref().map(duration).transpose()?,
        address: SocketAddress::Tcp { host, port: args.port },
        tls,
        file_name: args.name.clone().map_or_else(|| file_name(file, args.shape), Ok)?,
        has_digest: !args.no_digest,
    };
    // Clients take these names out of a URL.
    let is_folder = [".", ".."].contains(&plan.file_name.as_str());
    if plan.file_name.is_empty() || plan.file_name.contains(['/', '\0']) || is_folder {
        return Err(Failure::new(format!("'{}' is no name of a file", plan.file_name)));
    }
    let job = work::Foreground::new(console.persona, false, args.quiet, "sending")?.reading();
    let say = |url: &str| {
        console.line(url);
        console.flush();
    };
    let shared = async |handle: JobHandle| {
        let node = open_settled(&image, faults.as_ref(), &handle).await?;
        let shared = share(&node, &plan, &handle, say).await;
        let closed = close(&node, faults.is_some()).await;
        shared.and_then(|complete| closed.map(|()| complete))
    };
    let failed = |error: &Error| Failure::open(crate::invocation::Persona::Cowshed, file, error);
    match job.run(shared, failed)? {
        false if plan.once => Err(Failure::new("the disk was not downloaded completely")),
        _ => Ok(0),
    }
}

/// Opens the image. Its tables stay in memory, so a later change of its files must show. Where one could have the same time as the
/// last change, the image is opened again, for some seconds at most.
async fn open_settled(
    image: &ImageSpec,
    faults: Option<&BlockdevOptions>,
    job: &JobHandle,
) -> BlockResult<Arc<cowshed_image::Node>> {
    let begin = rt::now();
    loop {
        let node = match faults {
            Some(faults) => image.open_below(faults.clone()).await?,
            None => image.open_for_reading().await?,
        };
        let tree = nodes_below(&node);
        let is_young = tree.iter().any(|node| node.has_tables())
            && tree.iter().any(|node| node.file().is_some_and(File::was_opened_young));
        if !is_young || rt::now() >= begin + SETTLE_LIMIT || job.is_cancelled() {
            return Ok(node);
        }
        close(&node, faults.is_some()).await?;
        rt::sleep(SETTLE_PAUSE).await;
    }
}

async fn close(node: &Arc<cowshed_image::Node>, has_faults: bool) -> BlockResult<()> {
    match has_faults {
        true => node.graph().close_all().await,
        false => node.close().await,
    }
}

/// Serves until the end; true when a client got all of it.
async fn share(
    node: &Arc<cowshed_image::Node>,
    plan: &Plan,
    job: &JobHandle,
    say: impl FnOnce(&str),
) -> BlockResult<bool> {
    let disk = node.graph().attach(node, AttachRequest::export("share", false)).await?;
    let served = serve(&disk, plan, job, say).await;
    let detached = disk.detach().await;
    served.and_then(|complete| detached.map(|()| complete))
}

async fn serve(disk: &Arc<Attachment>, plan: &Plan, job: &JobHandle, say: impl FnOnce(&str)) -> BlockResult<bool> {
    let whole = Arc::new(AtomicU64::new(disk.size()));
    let content = content(disk, plan, &whole).await?;
    let len = whole.load(Ordering::Relaxed);
    let downloads = Arc::new(Downloads::default());
    job.set_progress(0, len);
    let (sent, shown, of_all) = (Arc::clone(&downloads), job.clone(), Arc::clone(&whole));
    let events = EventHandler(Arc::new(move |event: &Event<'_>| {
        let len = of_all.load(Ordering::Relaxed);
        match event {
            Event::Sent { peer, range, version, len: of, .. } if *of == len => {
                shown.set_progress(sent.add(peer, *version, range.clone()), len);
            }
            Event::Resumed { peer, version, start, .. } => sent.resume(peer, *version, *start),
            Event::Ended { peer, is_complete, .. } => sent.end(peer, *is_complete, len),
            Event::Failed { error, .. } => sent.report(error),
            _ => {}
        }
    }));
    let limits = Limits { piece_bytes: PIECE_BYTES as usize, ..Limits::default() };
    let scheme = if plan.tls.is_some() { "https" } else { "http" };
    let tls = plan.tls.clone();
    let server =
        Server::start(ServerConfig { tls, events: Some(events), limits, confirms: true, ..ServerConfig::default() })?;
    let file_name = plan.file_name.clone();
    let file_bytes = (plan.shape != Shape::Zstd).then_some(len);
    let facts = Facts { file_name, disk_bytes: disk.size(), file_bytes, digest: None, trouble: None };
    let page = Arc::new(Page::default());
    page.set(page::html(&facts, plan.has_digest));
    let path = format!("/{}/{}", secret()?, plan.file_name);
    server.add_with_page(&path, Arc::clone(&content), Some(Arc::new(Shown(Arc::clone(&page)))))?;
    let addresses = server.listen(&plan.address)?;
    let (SocketAddress::Tcp { host, .. }, Some(SocketAddress::Tcp { port, .. })) = (&plan.address, addresses.first())
    else {
        return Err(Error::internal("a server without a port"));
    };
    say(&url(scheme, reachable(host), *port, &path));
    let mut version = content.open().version().number;
    let mut digest =
        plan.has_digest.then(|| rt::spawn(show_digest(Arc::clone(&content), facts.clone(), Arc::clone(&page))));
    let mut refresh: Option<rt::JoinHandle<()>> = None;
    let end = plan.expires.map(|expires| rt::now() + expires);
    let complete = loop {
        if plan.once && downloads.is_complete() {
            break true;
        }
        if job.is_cancelled() || end.is_some_and(|end| rt::now() >= end) {
            break downloads.is_complete();
        }
        rt::sleep(LOOK).await;
        let now = content.open().version().number;
        if now != version {
            version = now;
            if let Some(digest) = digest.take() {
                digest.cancel().await;
            }
            if let Some(refresh) = refresh.take() {
                refresh.cancel().await;
            }
            // A digest of the disk as it was says nothing of the next download.
            let trouble = plan.has_digest.then_some("the disk was written to");
            let has_len = plan.shape != Shape::Zstd;
            let (content, page, facts) = (Arc::clone(&content), Arc::clone(&page), facts.clone());
            refresh = Some(rt::spawn(async move {
                content.follow().await;
                let file_bytes = has_len.then(|| content.open().size());
                page.set(page::html(&Facts { file_bytes, trouble, ..facts }, false));
            }));
        }
    };
    limit_end(u8::from(plan.once && !complete));
    for task in [digest, refresh].into_iter().flatten() {
        task.cancel().await;
    }
    server.stop(GRACE).await;
    Ok(complete || downloads.is_complete())
}

/// Ends the process where it doesn't end by itself.
fn limit_end(code: u8) {
    let wait = move || {
        std::thread::sleep(GRACE + STOP_LIMIT);
        work::end_process("a read of the disk does not end, and is given up".to_owned(), code)
    };
    // Without a thread the end has no limit.
    drop(std::thread::Builder::new().name("end of the share".to_owned()).spawn(wait));
}

/// The content; `len` is its length in bytes.
async fn content(disk: &Arc<Attachment>, plan: &Plan, len: &Arc<AtomicU64>) -> BlockResult<Arc<dyn Content>> {
    let (disk, file_name) = (Arc::clone(disk), plan.file_name.clone());
    Ok(match plan.shape {
        Shape::Raw => Arc::new(Raw { disk, file_name, packing: None }),
        Shape::Zstd => {
            let codec = Codec::zstd(ZSTD_LEVEL)?;
            let packing: Packing = Arc::new(move |piece| codec.zstd_frame(piece));
            Arc::new(Raw { disk, file_name, packing: Some(packing) })
        }
        Shape::Qcow2 => Arc::new(PackedContent::new(disk, file_name, Arc::clone(len)).await?),
    })
}

/// Computes the digest, and puts it on the page. A content that changes or can't be read has none.
async fn show_digest(content: Arc<dyn Content>, mut facts: Facts, page: Arc<Page>) {
    // A digest of bytes that a write still changes would stay with its times.
    let (reading, version) = loop {
        content.follow().await;
        let reading = content.open();
        let version = reading.version();
        if reading.is_settled() && !reading.may_be_amid_write() {
            break (reading, version);
        }
        rt::sleep(LOOK).await;
    };
    let mut digest = Sha256::new();
    let packing = content.packing();
    let (size, mut sent) = (reading.size(), 0);
    if let (0, Some(packing)) = (size, &packing) {
        let Ok(packed) = packing(&[]) else { return };
        sent = packed.len() as u64;
        digest.update(&packed);
    }
    let mut at = 0;
    while at < size {
        let len = usize::try_from(PIECE_BYTES.min(size - at)).unwrap_or(usize::MAX);
        let Ok(buf) = IoBuf::try_scratch(len) else { return };
        let (result, buf) = reading.read(at, buf).await;
        facts.trouble = match result {
            Err(_) => Some("the disk can't be read"),
            Ok(()) if reading.version() != version => Some("the disk was written to"),
            Ok(()) => None,
        };
        if facts.trouble.is_some() {
            page.set(page::html(&facts, false));
            return;
        }
        at += buf.len() as u64;
        let packing = packing.clone();
        let packed: BlockResult<(Sha256, usize)> = rt::run_on_cpu_pool(move || match packing {
            Some(packing) => {
                let packed = packing(&buf)?;
                digest.update(&packed);
                Ok((digest, packed.len()))
            }
            None => {
                digest.update(&buf[..]);
                Ok((digest, buf.len()))
            }
        })
        .await;
        let Ok((next, len)) = packed else { return };
        (digest, sent) = (next, sent + len as u64);
    }
    facts.file_bytes = Some(sent);
    facts.digest = Some(digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect());
    page.set(page::html(&facts, true));
}

/// 128 random bits, as hexadecimal digits.
fn secret() -> BlockResult<String> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes)
        .map_err(|error| Error::internal(format!("the system gives no random bytes: {error}")))?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// A number with a unit, in seconds without one.
fn duration(text: &str) -> Result<Duration, Failure> {
    let wrong =
        || Failure::new(format!("--expires expects seconds, or a number above 0 with s, m, h or d, not '{text}'"));
    let (digits, unit) = text.split_at(text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len()));
    let seconds = match unit {
        "" | "s" => 1,
        "m" => 60,
        "h" => 3600,
        "d" => 86_400,
        _ => return Err(wrong()),
    };
    let count: u64 = digits.parse().map_err(|_| wrong())?;
    let seconds = count.checked_mul(seconds).filter(|seconds| (1..=u64::from(u32::MAX)).contains(seconds));
    seconds.map(Duration::from_secs).ok_or_else(wrong)
}

/// The name of an image's file with the ending of the shared form.
fn file_name(file: &str, shape: Shape) -> Result<String, Failure> {
    let ending = shape.ending();
    let path = path_of_text(file);
    let is_path = path.file_name().is_some() && !file.contains("://") && !file.starts_with("json:");
    match path.file_stem().map(|stem| stem.to_string_lossy()).filter(|_| is_path && !file.contains('=')) {
        Some(stem) => Ok(format!("{stem}.{ending}")),
        None => Ok(format!("disk.{ending}")),
    }
}

fn is_of_this_machine(host: &str) -> bool {
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|address| address.to_canonical().is_loopback())
}

/// A host that clients can use, for one that means all of this machine's.
fn reachable(host: &str) -> String {
    match host.parse::<IpAddr>() {
        Ok(address) if address.is_unspecified() => host_name(),
        Ok(IpAddr::V6(address)) => format!("[{address}]"),
        _ => host.to_owned(),
    }
}

fn host_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    if name.trim().is_empty() { "localhost".to_owned() } else { name.trim().to_owned() }
}

fn url(scheme: &str, host: String, port: u16, path: &str) -> String {
    format!("{scheme}://{host}:{port}{}", percent_encoded(path, b"/._-~"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_units() {
        for (text, seconds) in [("90", 90), ("90s", 90), ("5m", 300), ("1h", 3600), ("2d", 172_800)] {
            assert_eq!(duration(text).ok(), Some(Duration::from_secs(seconds)), "{text}");
        }
        for text in ["", "0", "h", "1w", "-1h", "1.5h", "99999999999999999999", "4294967296"] {
            assert!(duration(text).is_err(), "{text}");
        }
    }

    #[test]
    fn files_get_the_ending_of_what_they_are() {
        let name = |file: &str, shape| file_name(file, shape).ok();
        assert_eq!(name("/a/b/disk.qcow2", Shape::Raw).as_deref(), Some("disk.raw"));
        assert_eq!(name("disk", Shape::Qcow2).as_deref(), Some("disk.qcow2"));
        assert_eq!(name("nbd://host/disk", Shape::Raw).as_deref(), Some("disk.raw"));
        assert_eq!(name("driver=qcow2,file.filename=a/b.img", Shape::Raw).as_deref(), Some("disk.raw"));
    }

    #[test]
    fn urls_are_spelled_for_clients() {
        assert_eq!(url("http", reachable("::1"), 80, "/a b/é"), "http://[::1]:80/a%20b/%C3%A9");
        assert!(is_of_this_machine("127.0.0.1") && is_of_this_machine("::1") && is_of_this_machine("localhost"));
        assert!(!is_of_this_machine("0.0.0.0") && !is_of_this_machine("example.org"));
    }
}
