// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The failure of a verb: the message for standard error and the exit code.

use crate::invocation::Persona;
use cowshed_create::NO_EXPORT;
use cowshed_image::open::is_nbd_name;
use cowshed_types::{Error, ErrorKind, LINE_END};

/// The early end of a verb.
#[derive(Debug)]
pub struct Failure {
    /// Without the program's name; may have several lines. Empty when everything has been printed.
    pub message: String,
    /// The message of programs that carry a name of QEMU, where that differs.
    pub sentence: Option<String>,
    /// The exit code.
    pub code: u8,
    /// Point to `--help`: the command line itself is wrong.
    pub usage: bool,
    /// The message is of the parser of options: tools of QEMU put the verb behind the program's name.
    pub names_verb: bool,
}

/// Beginnings of sentences that qemu-img prints without "Could not open" in front.
const UNFRAMED: &[&str] = &[
    "Failed to load snapshot: ",
    "Compression not supported for this file format",
    "Unknown file format",
    "output file is smaller",
    "Backing file '",
    "Cluster size must be ",
    // Of work on an image that could be opened.
    "Could not create snapshot '",
    "Could not apply snapshot '",
    "Could not delete snapshot '",
    "Could not resize file: ",
    "Failed to resize underlying file: ",
    "Could not preallocate new data: ",
    "Could not write zeros for preallocation: ",
    "Allocating clusters failed: ",
    "Failed to write refblock: ",
    "Could not read file metadata: ",
    "Lost persistent bitmaps ",
    "Unable to get block status: ",
    "Failed to grow the L1 table: ",
    "Failed to update the image size: ",
    "Failed to discard cropped clusters: ",
    "Failed to update the image header: ",
    "Block job failed: ",
    "Failed to empty ",
    "Error while writing to COW image: ",
    "Check failed: ",
    "Failed request: ",
    "Failed to create bitmap ",
    "Failed to populate bitmap ",
    "error while ",
];

/// Beginnings of sentences in front of which QEMU names no file.
const NAMELESS: [&str; 5] = [
    "Could not resize image: ",
    "output file is smaller",
    "Image is not in ",
    "Could not refresh total sector count: ",
    "Specified size is not multiple of 512",
];

impl Failure {
    /// A failure with exit code 1.
    pub fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), sentence: None, code: 1, usage: false, names_verb: false }
    }

    /// Appends to the message a part that a tool of QEMU doesn't print.
    #[must_use]
    pub fn hint(mut self, hint: &str) -> Self {
        let sentence = self.message.clone();
        self.message += hint;
        self.sentence.get_or_insert(sentence);
        self
    }

    /// The text for the persona.
    pub fn text(&self, persona: Persona) -> &str {
        match (persona, &self.sentence) {
            (Persona::QemuImg | Persona::Tool(_), Some(sentence)) => sentence,
            _ => &self.message,
        }
    }

    /// The command line is wrong: the message is followed by a pointer to the help.
    pub fn usage(message: impl Into<String>) -> Self {
        Self { usage: true, ..Self::new(message) }
    }

    /// Another exit code.
    #[must_use]
    pub fn code(mut self, code: u8) -> Self {
        self.code = code;
        self
    }

    /// An image could not be opened. qemu-img words it `Could not open 'NAME': REASON`, which scripts look for.
    pub fn open(persona: Persona, name: &str, error: &Error) -> Self {
        match persona {
            Persona::Cowshed | Persona::Tool(_) => Self::about(persona, name, error),
            Persona::QemuImg if error.message() == "can't find the snapshot" => {
                Self::new("Failed to load snapshot: Can't find snapshot")
            }
            // A target that can't be made, or isn't one for this, is no matter of opening.
            Persona::QemuImg if UNFRAMED.iter().any(|start| error.sentence().starts_with(start)) => {
                match error.kind() {
                    // QEMU reports damage with the system's words only; here its sentence comes, with the image.
                    ErrorKind::Io | ErrorKind::NoSpace | ErrorKind::Poisoned => Self::new(error.sentence()),
                    _ if error.sentence().starts_with("error while ") => {
                        Self::new(format!("{}: {}", error.file_name().unwrap_or(name), error.sentence()))
                    }
                    _ => Self::new(error.sentence()),
                }
            }
            Persona::QemuImg => Self::new(format!("Could not open '{name}': {}", qemu_reason(name, error))),
        }
    }

    /// As [`Failure::open`], under the name of the image whose backing file or data file the error concerns.
    fn of_backing(persona: Persona, error: &Error) -> Option<Self> {
        let named = [BELOW, DATA].iter().find_map(|start| error.message().strip_prefix(start));
        let (image, _) = named?.split_once("': ")?;
        Some(Self::open(persona, image, error))
    }

    /// As [`Failure::open`], for the one of several images that the error names.
    pub fn open_either(persona: Persona, names: &[&str], error: &Error) -> Self {
        let named = error.file_name().and_then(|file| names.iter().find(|name| names_file(name, file)));
        let named = named.or_else(|| names.iter().find(|name| is_unreached(name, error)));
        let named = named.or_else(|| only_remote(names, error));
        match (named.or(names.first()), named.is_some() || names.len() == 1) {
            (Some(name), true) => Self::open(persona, name, error),
            _ if persona == Persona::QemuImg => {
                Self::of_backing(persona, error).unwrap_or_else(|| Self::new(terse("", error)))
            }
            _ => Self::new(format!("{error:#}")),
        }
    }

    /// Something about the file `name` failed: `NAME: REASON`.
    pub fn about(persona: Persona, name: &str, error: &Error) -> Self {
        let reason = match persona {
            Persona::QemuImg => qemu_reason(name, error),
            Persona::Cowshed | Persona::Tool(_) => reason(name, error),
        };
        Self::new(format!("{name}: {reason}"))
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self { sentence: Some(qemu_reason("", &error)), ..Self::new(format!("{error:#}")) }
    }
}

impl From<clap::Error> for Failure {
    fn from(error: clap::Error) -> Self {
        Self::usage(error.to_string().trim_end().replace('\n', &LINE_END.to_string()))
    }
}

/// The beginning of an error that a backing file could not be opened, once for each image of the chain.
const BELOW: &str = "could not open the backing file of '";

/// The beginning of an error that a data file could not be opened.
const DATA: &str = "could not open the data file of '";

/// A backing file could not be opened: in qemu-img's words, which name the image only where the file is missing.
fn backing_reason(error: &Error) -> Option<String> {
    error.sentence().starts_with(BELOW).then(|| reason_behind("", error)).flatten()
}

/// qemu-img's reason for the file that could not be opened, where the sentence begins with `start`.
pub fn reason_behind(start: &str, error: &Error) -> Option<String> {
    let text = error.sentence();
    let mut rest = text.strip_prefix(start)?;
    let mut frame = String::new();
    while let Some((_, below)) = rest.strip_prefix(BELOW).and_then(|named| named.split_once("': ")) {
        frame += "Could not open backing file: ";
        rest = below;
    }
    let named = named_reason(error.file_name().unwrap_or_default(), error, rest);
    Some(frame + &named.unwrap_or_else(|| rest.to_owned()))
}

/// A lock of another process, in qemu-img's words.
fn lock_words(file: &str, error: &Error, message: &str) -> Option<String> {
    let (lock, _) = message.strip_prefix("failed to get ").and_then(|lock| lock.split_once(": "))?;
    let is_locked = error.kind() == ErrorKind::Busy;
    is_locked.then(|| format!("Failed to get {lock}{LINE_END}Is another process using the image [{file}]?"))
}

/// qemu-img's reason with the name of the file in it.
fn named_reason(file: &str, error: &Error, sentence: &str) -> Option<String> {
    if let Some((_, rest)) = sentence.strip_prefix(DATA).and_then(|named| named.split_once("': ")) {
        return Some(named_reason(file, error, rest).unwrap_or_else(|| rest.to_owned()));
    }
    if let Some(words) = lock_words(file, error, sentence) {
        return Some(words);
    }
    let words = [("could not open: ", "Could not open"), ("could not create: ", "Could not create")];
    words.iter().find_map(|(ours, theirs)| Some(format!("{theirs} '{file}': {}", sentence.strip_prefix(ours)?)))
}

/// True when the image called `name`, perhaps by image options, is in this file.
fn names_file(name: &str, file: &str) -> bool {
    let mut values = name.split(',').filter_map(|item| item.split_once("filename="));
    let is_protocol = |start: &str| ["file", "host_device", "host_cdrom"].contains(&start);
    let plain = name.split_once(':').filter(|(start, _)| is_protocol(start)).map(|(_, plain)| plain);
    let is_in_json = || ['"', '\''].iter().any(|quote| name.contains(&format!("{quote}{file}{quote}")));
    name == file
        || plain == Some(file)
        || values.any(|(_, value)| value == file)
        || (name.starts_with("json:") && is_in_json())
}

/// True when the error is about the NBD server in `name`, which has several forms.
pub fn is_unreached(name: &str, error: &Error) -> bool {
    let sentence = error.sentence();
    let address = sentence.strip_prefix("Failed to connect to '").and_then(|rest| rest.split_once("': "));
    address.is_some_and(|(address, _)| name.contains("nbd") && name.contains(address))
}

/// The only one of the images that is on a server, where the error is about such a one. Its name has several forms.
fn only_remote<'a, 'b>(names: &'a [&'b str], error: &Error) -> Option<&'a &'b str> {
    let mut remote = names.iter().filter(|name| error.file_name().is_some_and(is_nbd_name) && name.contains("nbd"));
    let first = remote.next();
    first.filter(|_| remote.next().is_none())
}

/// As [`reason`], with qemu-img's words where scripts look for them.
pub fn qemu_reason(name: &str, error: &Error) -> String {
    let file = error.file_name().unwrap_or(name);
    let sentence = error.sentence();
    let words = lock_words(file, error, error.message()).or_else(|| named_reason(file, error, &sentence));
    if let Some(words) = words.or_else(|| backing_reason(error)) {
        return words;
    }
    if let Some(reason) = reason_behind(&format!("{NO_EXPORT}: "), error) {
        return format!(
            "Protocol driver 'nbd' does not support creating new images, so an existing image must be selected as the target; \
             however, opening the given target as an existing image failed: {reason}"
        );
    }
    // These name their subject themselves.
    if ["address resolution failed for ", "Failed to connect to '", "UNIX socket path '"]
        .iter()
        .any(|start| sentence.starts_with(start))
    {
        return sentence;
    }
    // Names in image options aren't repeated.
    let reason = terse(if names_file(name, file) { file } else { name }, error);
    match sentence.strip_prefix("could not change the size: ") {
        Some(rest) => format!("Could not resize file: {rest}"),
        None => reason,
    }
}

/// QEMU's sentence, with the file in front unless it is `name`, which the caller has named already.
fn terse(name: &str, error: &Error) -> String {
    let sentence = error.sentence();
    match error.file_name() {
        // A server is named by the caller, in another of its forms.
        Some(file) if is_nbd_name(file) && !name.is_empty() => sentence,
        Some(_) if NAMELESS.iter().any(|start| sentence.starts_with(start)) => sentence,
        Some(file) if file != name && !sentence.starts_with(&format!("Could not open '{file}'")) => {
            format!("{file}: {sentence}")
        }
        _ => sentence,
    }
}

/// The error's text without `name` in front, which the caller has named already.
fn reason(name: &str, error: &Error) -> String {
    let text = format!("{error:#}");
    match text.strip_prefix(name).and_then(|rest| rest.strip_prefix(": ")) {
        Some(rest) => rest.to_owned(),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cowshed_types::{Errno, with_line_ends};

    #[test]
    fn locks_are_worded_as_scripts_know_them() {
        let text = "failed to get \"write\" lock: another process uses the image and does not share it";
        let error = Error::new(ErrorKind::Busy, text).file("a.qcow2");
        let failure = Failure::open(Persona::QemuImg, "a.qcow2", &error);
        let expected =
            "Could not open 'a.qcow2': Failed to get \"write\" lock\nIs another process using the image [a.qcow2]?";
        assert_eq!(with_line_ends(&failure.message), expected);
    }

    #[test]
    fn each_image_of_a_chain_is_a_frame() {
        let error = Error::os(Errno::ENOENT, "could not open").file("a");
        let error =
            error.context("could not open the backing file of 'b'").context("could not open the backing file of 'c'");
        let failure = Failure::open(Persona::QemuImg, "driver=qcow2,file.filename=c", &error);
        let expected = "Could not open 'driver=qcow2,file.filename=c': Could not open backing file: Could not open backing \
                        file: Could not open 'a': No such file or directory";
        assert_eq!(failure.message, expected);
    }

    #[test]
    fn the_name_is_said_once() {
        let error = Error::os(Errno::ENOENT, "could not open").file("a.qcow2");
        let failure = Failure::about(Persona::Cowshed, "a.qcow2", &error);
        assert_eq!(failure.message, "a.qcow2: could not open: No such file or directory");
        let other = Failure::about(Persona::Cowshed, "b.qcow2", &error);
        assert_eq!(other.message, "b.qcow2: a.qcow2: could not open: No such file or directory");
    }
}
