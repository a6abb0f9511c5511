// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The least that an NBD server can do: one thread a connection, blocking system calls, a raw file, no format, no
//! statistics, no limits. What it needs for a request is what the kernel takes from every server.

use cowshed_nbd_proto::flags::{HandshakeFlags, TransmissionFlags};
use cowshed_nbd_proto::option::{OPTION_HEADER_BYTES, OptionHeader, OptionReply, code, rep};
use cowshed_nbd_proto::{Command, HeaderStyle, Request, greeting, reply};
use rustix::fs::OFlags;
use std::fs::File;
use std::io::{self, IoSlice, Read, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process;
use std::sync::Arc;

/// The option by which this program starts itself as that server; socket and file follow.
pub const SERVE: &str = "--serve-bare";

/// Behind socket and file: past the page cache.
const DIRECT: &str = "direct";
/// What memory for direct I/O is a multiple of.
const ALIGNMENT: usize = 4096;
/// Bytes received at once, beside the data of writes.
const INPUT_BYTES: usize = 64 << 10;
/// Replies that gather before they are sent; one more read may follow.
const OUTPUT_BYTES: usize = 256 << 10;
/// The longest request.
const LONGEST_BYTES: usize = 2 << 20;
const EINVAL: u32 = 22;

/// The command line that starts it; with `direct` it goes past the page cache.
pub fn command(socket: &Path, file: &Path, direct: bool) -> Result<process::Command, String> {
    let own = std::env::current_exe().map_err(|e| e.to_string())?;
    let mut command = process::Command::new(own);
    command.arg(SERVE).args([socket, file]).args(direct.then_some(DIRECT));
    Ok(command)
}

/// What the started process does, until it is ended; `how` is empty or [`DIRECT`].
pub fn serve(socket: &str, file: &str, how: &[String]) -> Result<(), String> {
    let fail = |e: io::Error| format!("bare server of {file}: {e}");
    let flags = if how == [DIRECT] { OFlags::DIRECT.bits().cast_signed() } else { 0 };
    let opened = File::options().read(true).write(true).custom_flags(flags).open(file);
    let file = Arc::new(opened.map_err(fail)?);
    for stream in UnixListener::bind(socket).map_err(fail)?.incoming() {
        let (stream, file) = (stream.map_err(fail)?, Arc::clone(&file));
        // A client that goes away ends its thread only.
        std::thread::spawn(move || drop(talk(&stream, &file, flags != 0)));
    }
    Ok(())
}

fn malformed(_: cowshed_nbd_proto::Malformed) -> io::Error {
    io::ErrorKind::InvalidData.into()
}

fn talk(mut stream: &UnixStream, file: &File, direct: bool) -> io::Result<()> {
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
            OptionReply::Export(file.metadata()?.len(), flags).append(header.option, &mut answer);
            OptionReply::Ack.append(header.option, &mut answer);
            stream.write_all(&answer)?;
            return transmit(stream, file, direct);
        }
        OptionReply::Refused(rep::ERR_UNSUP, "").append(header.option, &mut answer);
        stream.write_all(&answer)?;
    }
}

fn transmit(mut stream: &UnixStream, file: &File, direct: bool) -> io::Result<()> {
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
            Command::Read if direct && len <= LONGEST_BYTES => {
                file.read_exact_at(&mut data[..len], request.offset)?;
                output[head].copy_from_slice(&reply::simple(request.cookie, 0));
                let sent = stream.write_vectored(&[IoSlice::new(&output[..ready]), IoSlice::new(&data[..len])])?;
                stream.write_all(&output[sent.min(ready)..ready])?;
                stream.write_all(&data[sent.saturating_sub(ready)..len])?;
                ready = 0;
                continue;
            }
            Command::Read if len <= LONGEST_BYTES => {
                file.read_exact_at(&mut output[ready..ready + len], request.offset)?;
                ready += len;
            }
            Command::Write if len <= LONGEST_BYTES => {
                let here = len.min(end - start);
                data[..here].copy_from_slice(&input[start..start + here]);
                start += here;
                stream.read_exact(&mut data[here..len])?;
                file.write_all_at(&data[..len], request.offset)?;
            }
            Command::Flush => file.sync_data()?,
            _ => error = EINVAL,
        }
        output[head].copy_from_slice(&reply::simple(request.cookie, error));
    }
}
