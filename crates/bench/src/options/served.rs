// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Options of images that are served over NBD: each run has a server of its own, and where it writes a fresh image.

use super::{Taken, in_turns, is_wanted};
use crate::Settings;
use crate::cases::allocated;
use crate::fixture::{self, Kind};
use crate::memory;
use crate::nbd::{Server, resident_bytes};
use crate::reads::{self, Serving, Side};
use crate::table::{Outcome, Row};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// One value of an option.
#[derive(Clone, Copy)]
struct Value {
    /// Options of the fresh image, for `create`; `DATA` stands for the name of a second file.
    create: &'static str,
    /// Options of the file node.
    file: &'static str,
    /// Options of the qcow2 node.
    node: &'static str,
    /// Options of the program.
    program: &'static [&'static str],
    /// Threads of `cowshed serve`, in place of the storage daemon.
    queues: Option<&'static str>,
}

const PLAIN: Value = Value { create: "", file: "", node: "", program: &[], queues: None };

const fn create(create: &'static str) -> Value {
    Value { create, ..PLAIN }
}

const fn file(file: &'static str) -> Value {
    Value { file, ..PLAIN }
}

const fn node(node: &'static str) -> Value {
    Value { node, ..PLAIN }
}

/// The served disk.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Image {
    /// An empty one, made anew for each run.
    Empty,
    /// The same over a full backing file.
    Overlay,
    /// An image full of data; a copy for each run that writes.
    Full,
    /// 20 GiB whose clusters were written in random order: its mapping can't be kept small.
    Scattered,
}

#[derive(Clone, Copy)]
struct Load {
    rw: &'static str,
    bs: &'static str,
    depth: &'static str,
    more: &'static [&'static str],
}

const RANDOM_READ: Load = Load { rw: "randread", bs: "4k", depth: "32", more: &[] };
const RANDOM_WRITE: Load = Load { rw: "randwrite", ..RANDOM_READ };
const IN_ORDER: Load = Load { rw: "write", bs: "64k", depth: "8", more: &[] };
const ZEROES: Load = Load { more: &["--zero_buffers"], ..IN_ORDER };
const TRIM: Load = Load { rw: "trim", ..IN_ORDER };
const TWO_CLIENTS: Load = Load { more: &["--numjobs=2"], ..RANDOM_READ };

struct Case {
    name: &'static str,
    image: Image,
    load: Load,
    off: Value,
    on: Value,
    /// QEMU has the option too.
    has_theirs: bool,
    /// The time after the load at which memory is looked at, in place of the peak.
    idle_seconds: Option<u64>,
}

const fn case(name: &'static str, image: Image, load: Load, off: Value, on: Value) -> Case {
    Case { name, image, load, off, on, has_theirs: true, idle_seconds: None }
}

const DIRECT_THREADS: Value = file("aio=threads,cache.direct=on");
const DIRECT_URING: Value = file("aio=io_uring,cache.direct=on");
const DIRECT_NATIVE: Value = file("aio=native,cache.direct=on");
const UNMAP: Value = Value { file: "discard=unmap", ..node("discard=unmap") };
const DETECT_UNMAP: Value = Value { file: "discard=unmap", ..node("discard=unmap,detect-zeroes=unmap") };
const SMALL_BUDGET: Value = Value { program: &["--metadata-budget", "1M"], ..PLAIN };
const DATA_FILE: Value = create("data_file=DATA,data_file_raw=on");

const CASES: &[Case] = &[
    case(
        "aio=io_uring instead of threads, cached reads",
        Image::Full,
        RANDOM_READ,
        file("aio=threads"),
        file("aio=io_uring"),
    ),
    case("aio=io_uring instead of threads, direct reads", Image::Full, RANDOM_READ, DIRECT_THREADS, DIRECT_URING),
    case("aio=native instead of threads, direct reads", Image::Full, RANDOM_READ, DIRECT_THREADS, DIRECT_NATIVE),
    case(
        "aio=io_uring instead of threads, cached writes",
        Image::Empty,
        RANDOM_WRITE,
        file("aio=threads"),
        file("aio=io_uring"),
    ),
    case("cache.direct=on, random reads", Image::Full, RANDOM_READ, PLAIN, file("cache.direct=on")),
    case(
        "extended_l2=on, overlay of 128k clusters, random writes",
        Image::Overlay,
        RANDOM_WRITE,
        create("cluster_size=128k"),
        create("cluster_size=128k,extended_l2=on"),
    ),
    case(
        "cluster_size=2M instead of 64k, overlay, random writes",
        Image::Overlay,
        RANDOM_WRITE,
        PLAIN,
        create("cluster_size=2M"),
    ),
    case("cluster_size=2M instead of 64k, writes in order", Image::Empty, IN_ORDER, PLAIN, create("cluster_size=2M")),
    case("lazy_refcounts=on, writes in order", Image::Empty, IN_ORDER, PLAIN, create("lazy_refcounts=on")),
    case("lazy_refcounts=on, random writes", Image::Empty, RANDOM_WRITE, PLAIN, create("lazy_refcounts=on")),
    case(
        "refcount-cache-size=4M instead of 256k, writes in order",
        Image::Empty,
        IN_ORDER,
        node("refcount-cache-size=262144"),
        node("refcount-cache-size=4194304"),
    ),
    case("preallocation=metadata, random writes", Image::Empty, RANDOM_WRITE, PLAIN, create("preallocation=metadata")),
    case("preallocation=falloc, random writes", Image::Empty, RANDOM_WRITE, PLAIN, create("preallocation=falloc")),
    case("preallocation=full, random writes", Image::Empty, RANDOM_WRITE, PLAIN, create("preallocation=full")),
    case("data_file, writes in order", Image::Empty, IN_ORDER, PLAIN, DATA_FILE),
    case("data_file, random writes", Image::Empty, RANDOM_WRITE, PLAIN, DATA_FILE),
    case("detect-zeroes=on, zeroes over data", Image::Full, ZEROES, PLAIN, node("detect-zeroes=on")),
    case("detect-zeroes=unmap, zeroes over data", Image::Full, ZEROES, UNMAP, DETECT_UNMAP),
    case("detect-zeroes=on, data over data", Image::Full, IN_ORDER, PLAIN, node("detect-zeroes=on")),
    case("detect-zeroes=unmap, data over data", Image::Full, IN_ORDER, UNMAP, DETECT_UNMAP),
    case(
        "discard=unmap instead of ignore, discards of all",
        Image::Full,
        TRIM,
        Value { file: "discard=ignore", ..node("discard=ignore") },
        UNMAP,
    ),
    Case {
        idle_seconds: Some(3),
        ..case(
            "cache-clean-interval=1 instead of 0, scattered; resident 3 s after reads",
            Image::Scattered,
            RANDOM_READ,
            node("l2-cache-size=4194304,cache-clean-interval=0"),
            node("l2-cache-size=4194304,cache-clean-interval=1"),
        )
    },
    Case {
        has_theirs: false,
        ..case(
            "--metadata-budget 1M instead of 256M, scattered, random reads",
            Image::Scattered,
            RANDOM_READ,
            PLAIN,
            SMALL_BUDGET,
        )
    },
    Case {
        has_theirs: false,
        ..case(
            "--queues 2 instead of 1, two clients, cached reads",
            Image::Full,
            TWO_CLIENTS,
            Value { queues: Some("1"), ..PLAIN },
            Value { queues: Some("2"), ..PLAIN },
        )
    },
];

pub fn rows(settings: &Settings) -> Result<Vec<Row>, String> {
    CASES.iter().filter(|case| is_wanted(settings, case.name)).map(|case| row(settings, case)).collect()
}

fn row(settings: &Settings, case: &Case) -> Result<Row, String> {
    let source = match case.image {
        Image::Empty | Image::Overlay => fixture::of_kind(settings, Kind::Full)?,
        Image::Full => fixture::converted(settings, &fixture::full(settings)?, "allocated", &["-S", "0"])?,
        Image::Scattered => reads::scattered(settings, SCATTERED_BYTES)?,
    };
    let once = |side, is_on| once(settings, case, if is_on { &case.on } else { &case.off }, &source, side);
    let (ours, theirs) = in_turns(settings, case.has_theirs, once)?;
    Ok(Row::new(case.name, "report", Outcome::Options { ours, theirs, is_command: false }))
}

const MIB: u64 = 1 << 20;
const CLUSTER_BYTES: u64 = 64 << 10;
const SCATTERED_BYTES: u64 = 20 << 30;

/// Files of a run, removed at its end.
struct Files {
    image: PathBuf,
    data: PathBuf,
}

impl Drop for Files {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.image);
        let _ = std::fs::remove_file(&self.data);
    }
}

fn once(settings: &Settings, case: &Case, value: &Value, source: &Path, side: Side) -> Result<Taken, String> {
    let folder = &settings.folder;
    let files = Files { image: folder.join("option.image"), data: folder.join("option.data") };
    let writes = !case.load.rw.ends_with("read");
    let image = match case.image {
        Image::Empty | Image::Overlay => make(settings, case, value, source, &files)?,
        Image::Full if writes => {
            std::fs::copy(source, &files.image).map_err(|e| format!("{}: {e}", files.image.display()))?;
            &files.image
        }
        Image::Full | Image::Scattered => source,
    };
    let bytes = match case.image {
        Image::Empty | Image::Overlay => settings.size_mib / 2 * MIB,
        Image::Full => settings.size_mib / 8 * MIB,
        Image::Scattered => SCATTERED_BYTES,
    };
    if writes {
        memory::back(settings.size_mib)?;
    }
    let server = match value.queues {
        Some(queues) => with_queues(settings, image, queues)?,
        None => {
            let Value { file, node, program, .. } = *value;
            reads::serve_with(
                settings,
                side,
                &Serving { image, format: "qcow2", file, node, writable: writes, program },
            )?
        }
    };
    let Load { rw, bs, depth, more, .. } = case.load;
    let mut how = vec![format!("--rw={rw}"), format!("--bs={bs}"), format!("--iodepth={depth}")];
    how.extend(more.iter().map(|&option| option.to_owned()));
    how.push(format!("--size={bytes}"));
    if writes {
        // All of the disk in order, or random requests to a third of its clusters or a little more.
        let number = bytes / CLUSTER_BYTES / if rw.starts_with("rand") { 2 } else { 1 };
        how.extend([format!("--number_ios={number}"), "--end_fsync=1".to_owned()]);
    } else {
        how.extend(["--time_based".to_owned(), "--runtime=1".to_owned()]);
        server.load(settings, &how, None)?;
        how.extend([format!("--runtime={}", settings.seconds)]);
    }
    let served = server.load(settings, &how, writes.then_some(image))?;
    let peak_bytes = match case.idle_seconds {
        Some(seconds) => {
            std::thread::sleep(Duration::from_secs(seconds));
            resident_bytes(server.id())?
        }
        None => served.peak_bytes,
    };
    // Writes that are held back until it closes the image count.
    drop(server);
    let size = || -> Result<u64, String> {
        let data = if files.data.exists() { allocated(&files.data)? } else { 0 };
        Ok(allocated(image)? + data)
    };
    Ok(Taken {
        seconds: 1.0 / served.per_second.max(1e-9),
        cpu_seconds: served.cpu_microseconds / 1e6,
        peak_bytes,
        written_bytes: served.written_bytes.map(|bytes| bytes * served.operations),
        size_bytes: if writes { Some(size()?) } else { None },
    })
}

/// A fresh image, complete on the disk.
fn make<'a>(
    settings: &Settings,
    case: &Case,
    value: &Value,
    backing: &Path,
    files: &'a Files,
) -> Result<&'a Path, String> {
    let mut create = Command::new(&settings.qemu);
    create.args(["create", "-q", "-f", "qcow2"]);
    if !value.create.is_empty() {
        create.arg("-o").arg(value.create.replace("DATA", &files.data.to_string_lossy()));
    }
    if case.image == Image::Overlay {
        create.args(["-F", "raw", "-b"]).arg(backing);
        let mut file = std::fs::File::open(backing).map_err(|e| format!("{}: {e}", backing.display()))?;
        // Other rows may have driven it out of the page cache.
        std::io::copy(&mut file, &mut std::io::sink()).map_err(|e| format!("{}: {e}", backing.display()))?;
    }
    create.arg(&files.image).arg(format!("{}M", settings.size_mib / 2));
    let output = create.output().map_err(|e| format!("could not run {create:?}: {e}"))?;
    if !output.status.success() {
        return Err(format!("{create:?}: {}", String::from_utf8_lossy(&output.stderr).trim()));
    }
    Ok(&files.image)
}

fn with_queues(settings: &Settings, image: &Path, queues: &str) -> Result<Server, String> {
    let socket = settings.folder.join("ours.sock");
    let mut command = Command::new(&settings.cowshed);
    command.args(["serve", "--read-only", "--queues", queues, "-f", "qcow2", "-x", "disk", "-k"]);
    command.arg(&socket).arg(image).stderr(std::process::Stdio::null());
    let server = Server::start(command, socket.clone())?;
    reads::await_export(settings, &socket)?;
    Ok(server)
}
