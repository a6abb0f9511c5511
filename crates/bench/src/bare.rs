// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The least possible NBD server: one thread a connection, blocking system calls, a raw file or several, no format, no
//! statistics, no limits. Its cost of a request is the part that the kernel takes from every server.

use cowshed_nbd_proto::flags::{HandshakeFlags, TransmissionFlags};
use cowshed_nbd_proto::option::{OPTION_HEADER_BYTES, OptionHeader, OptionReply, code, rep};
use cowshed_nbd_proto::{Command, HeaderStyle, Request, greeting, reply};
use rustix::fs::OFlags;
use std::fs::File;
use std::io::{self, IoSlice, Read, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process;
use std::sync::Arc;

/// The option by which this program starts itself as that server; socket and files follow.
pub const SERVE: &str = "--serve-bare";

/// Behind socket and files: past the page cache.
const DIRECT: &str = "direct";
/// Several files hold pieces of this length in turn: the served disk takes one after the other.
pub const GRANULE_BYTES: u64 = 64 << 10;
/// Multiple that memory for direct I/O needs, in bytes.
const ALIGNMENT: usize = 4096;
/// Bytes received at once, beside the data of writes.
const INPUT_BYTES: usize = 64 << 10;
/// Replies that gather before they are sent; one more read may follow.
const OUTPUT_BYTES: usize = 256 << 10;
/// The longest request.
const LONGEST_BYTES: usize = 2 << 20;
const EINVAL: u32 = 22;

/// The command line that starts it; with `direct` it goes past the page cache. Several files, of one length, are served
/// as one disk. It is granule after granule of [`GRANULE_BYTES`] from one file after the other, as the layers of a
/// chain would have them.
pub fn command(socket: &Path, files: &[PathBuf], direct: bool) -> Result<process::Command, String> {
    let own = std::env::current_exe().map_err(|e| e.to_string())?;
    let mut command = process::Command::new(own);
    command.arg(SERVE).arg(socket).args(files).args(direct.then_some(DIRECT));
    Ok(command)
}

/// The served disk.
struct Disk {
    files: Vec<File>,
    direct: bool,
}

impl Disk {
    fn open(files: &[String], direct: bool) -> io::Result<Disk> {
        let flags = if direct { OFlags::DIRECT.bits().cast_signed() } else { 0 };
        let open = |path| File::options().read(true).write(true).custom_flags(flags).open(path);
        Ok(Disk { files: files.iter().map(open).collect::<io::Result<_>>()?, direct })
    }

    fn len(&self) -> io::Result<u64> {
        let first = self.files.first().ok_or(io::ErrorKind::InvalidInput)?;
        Ok(first.metadata()?.len() * self.files.len() as u64)
    }

    /// The part of a disk's range that is in one file: the file, the offset in it and the length.
    fn place(&self, offset: u64, len: usize) -> (&File, u64, usize) {
        if let [file] = self.files.as_slice() {
            return (file, offset, len);
        }
        let (granule, within) = (offset / GRANULE_BYTES, offset % GRANULE_BYTES);
        let (index, count) = ((granule % self.files.len() as u64) as usize, granule / self.files.len() as u64);
        let here = usize::try_from(GRANULE_BYTES - within).unwrap_or(usize::MAX).min(len);
        (&self.files[index], count * GRANULE_BYTES + within, here)
    }

    fn read(&self, mut data: &mut [u8], mut offset: u64) -> io::Result<()> {
        while !data.is_empty() {
            let (file, at, len) = self.place(offset, data.len());
            let (here, rest) = data.split_at_mut(len);
            file.read_exact_at(here, at)?;
            (data, offset) = (rest, offset + len as u64);
        }
        Ok(())
    }

    fn write(&self, mut data: &[u8], mut offset: u64) -> io::Result<()> {
        while !data.is_empty() {
            let (file, at, len) = self.place(offset, data.len());
            let (here, rest) = data.split_at(len);
            file.write_all_at(here, at)?;
            (data, offset) = (rest, offset + len as u64);
        }
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        self.files.iter().try_for_each(File::sync_data)
    }
}

/// Serves the files until the process is ended; behind the files there may be [`DIRECT`].
pub fn serve(socket: &str, files: &[String]) -> Result<(), String> {
    let fail = |e: io::Error| format!("bare server of {}: {e}", files.join(", "));
    let (files, direct) = match files.split_last() {
        Some((last, files)) if last == DIRECT => (files, true),
        _ => (files, false),
    };
    let disk = Arc::new(Disk::open(files, direct).map_err(fail)?);
    for stream in UnixListener::bind(socket).map_err(fail)?.incoming() {
        let (stream, disk) = (stream.map_err(fail)?, Arc::clone(&disk));
        // A client that goes away ends its thread only.
        std::thread::spawn(move || drop(talk(&stream, &disk)));
    }
    Ok(())
}

fn malformed(_: cowshed_nbd_proto::Malformed) -> io::Error {
    io::ErrorKind::InvalidData.into()
}

fn talk(mut stream: &UnixStream, disk: &Disk) -> io::Result<()> {
    stream.write_all(&greeting::encode(HandshakeFlags::FIXED_NEWSTYLE.with(HandshakeFlags::NO_ZEROES, true)))?;
    stream.read_exact(&mut [0; 4])?;
    loop {
        let mut header = [0; OPTION_HEADER_BYTES];
        stream.read_exact(&mut header)?;
        let header = OptionHeader::parse(&header).map_err(malformed)?;
        stream.read_exact(&mut vec![0; header.len as usize])?;
        let mut answer = Vec::new();
        if header.option == code::GO {
            let flags = TransmissionFlags::HAS_FLAGS.with(TransmissionFlags::SEND_FLUSH, true);
            let flags = flags.with(TransmissionFlags::CAN_MULTI_CONN, true);
            OptionReply::Export(disk.len()?, flags).append(header.option, &mut answer);
            OptionReply::Ack.append(header.option, &mut answer);
            stream.write_all(&answer)?;
            return transmit(stream, disk);
        }
        OptionReply::Refused(rep::ERR_UNSUP, "").append(header.option, &mut answer);
        stream.write_all(&answer)?;
    }
}

fn transmit(mut stream: &UnixStream, disk: &Disk) -> io::Result<()> {
    let style = HeaderStyle::Compact;
    let mut input = vec![0; INPUT_BYTES];
    let (mut start, mut end) = (0, 0);
    let mut output = vec![0; OUTPUT_BYTES + LONGEST_BYTES + reply::SIMPLE_BYTES];
    let mut ready = 0;
    let mut data = vec![0; LONGEST_BYTES + ALIGNMENT];
    let aligned = data.as_ptr().align_offset(ALIGNMENT);
    let data = &mut data[aligned..];
    loop {
        let waits = end - start < style.request_bytes();
        if waits || ready >= OUTPUT_BYTES {
            stream.write_all(&output[..ready])?;
            ready = 0;
        }
        if waits {
            input.copy_within(start..end, 0);
            (start, end) = (0, end - start);
            match stream.read(&mut input[end..])? {
                0 => return Ok(()),
                count => end += count,
            }
            continue;
        }
        let request = Request::parse(style, &input[start..end]).map_err(malformed)?;
        start += style.request_bytes();
        let len = usize::try_from(request.length).unwrap_or(usize::MAX);
        let mut error = 0;
        let head = ready..ready + reply::SIMPLE_BYTES;
        ready = head.end;
        match request.command {
            Command::Disconnect => return Ok(()),
            // Direct I/O needs aligned memory, which is sent as it is.
            Command::Read if disk.direct && len <= LONGEST_BYTES => {
                disk.read(&mut data[..len], request.offset)?;
                output[head].copy_from_slice(&reply::simple(request.cookie, 0));
                let sent = stream.write_vectored(&[IoSlice::new(&output[..ready]), IoSlice::new(&data[..len])])?;
                stream.write_all(&output[sent.min(ready)..ready])?;
                stream.write_all(&data[sent.saturating_sub(ready)..len])?;
                ready = 0;
                continue;
            }
            Command::Read if len <= LONGEST_BYTES => {
                disk.read(&mut output[ready..ready + len], request.offset)?;
                ready += len;
            }
            Command::Write if len <= LONGEST_BYTES => {
                let here = len.min(end - start);
                data[..here].copy_from_slice(&input[start..start + here]);
                start += here;
                stream.read_exact(&mut data[here..len])?;
                disk.write(&data[..len], request.offset)?;
            }
            Command::Flush => disk.flush()?,
            _ => error = EINVAL,
        }
        output[head].copy_from_slice(&reply::simple(request.cookie, error));
    }
}
