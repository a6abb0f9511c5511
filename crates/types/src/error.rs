// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The one public error: its kind, its place, its value.

use crate::name::with_line_ends;
use std::fmt;

/// Result with [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A Linux error number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Errno(pub i32);

#[allow(missing_docs)]
impl Errno {
    pub const EPERM: Errno = Errno(1);
    pub const ENOENT: Errno = Errno(2);
    pub const EINTR: Errno = Errno(4);
    pub const EIO: Errno = Errno(5);
    pub const EAGAIN: Errno = Errno(11);
    pub const ENOMEM: Errno = Errno(12);
    pub const EACCES: Errno = Errno(13);
    pub const EBUSY: Errno = Errno(16);
    pub const EEXIST: Errno = Errno(17);
    pub const ENODEV: Errno = Errno(19);
    pub const ENOTDIR: Errno = Errno(20);
    pub const EISDIR: Errno = Errno(21);
    pub const EINVAL: Errno = Errno(22);
    pub const EFBIG: Errno = Errno(27);
    pub const ENOSPC: Errno = Errno(28);
    pub const EROFS: Errno = Errno(30);
    pub const ENOSYS: Errno = Errno(38);
    pub const ENOTSUP: Errno = Errno(95);
    pub const ETIMEDOUT: Errno = Errno(110);
    pub const ENOMEDIUM: Errno = Errno(123);
    pub const ECANCELED: Errno = Errno(125);
}

/// The class of an [`Error`]; decides errno, exit code and QMP class where nothing more exact is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A file, node, export or job that doesn't exist.
    NotFound,
    /// The operating system refuses access.
    PermissionDenied,
    /// An option, argument or request of the caller is wrong.
    InvalidArgument,
    /// A structure on disk contradicts its specification.
    InvalidImage,
    /// Valid, but not something this version does.
    Unsupported,
    /// An I/O error of the operating system.
    Io,
    /// No space left on the device.
    NoSpace,
    /// Locked or in use by another process or user.
    Busy,
    /// Writing to something that is read-only.
    ReadOnly,
    /// A limit of this program or of a policy was hit.
    Limit,
    /// An earlier flush failed, so nothing after it can be trusted until the file is opened again.
    Poisoned,
    /// Cancelled by the user.
    Cancelled,
    /// A bug of this program.
    Internal,
}

#[derive(Clone, Debug)]
struct Repr {
    kind: ErrorKind,
    message: String,
    /// QEMU's sentence for the same, where it differs.
    sentence: Option<String>,
    file: Option<String>,
    field: Option<&'static str>,
    offset: Option<u64>,
    value: Option<String>,
    errno: Option<Errno>,
    report: Option<String>,
}

/// An error: its kind and a message in lower case. As far as they are known: the file, the format's field, its offset
/// and value, the errno.
///
/// `Display` gives `FILE: MESSAGE (FIELD at offset OFFSET is VALUE)`, leaving out unknown parts. The line ends of the
/// message are line ends, or with `{:#}` each is a [`crate::LINE_END`].
#[derive(Clone, Debug)]
pub struct Error(Box<Repr>);

impl Error {
    /// A new error. `message` starts in lower case and has no full stop.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Error(Box::new(Repr {
            kind,
            message: message.into(),
            sentence: None,
            file: None,
            field: None,
            offset: None,
            value: None,
            errno: None,
            report: None,
        }))
    }

    /// An image that contradicts its format: `field` holds `value`, and `message` has the reason why that can't be.
    pub fn invalid_image(field: &'static str, value: impl fmt::Display, message: impl Into<String>) -> Self {
        Self::new(ErrorKind::InvalidImage, message).field(field).value(value)
    }

    /// A wrong argument or option.
    pub fn invalid_argument(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::InvalidArgument, message)
    }

    /// Something valid that isn't supported.
    pub fn unsupported(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Unsupported, message)
    }

    /// A bug of this program, reported instead of panicking.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Internal, message)
    }

    /// An error of the operating system, `doing` names the operation ("could not read", …).
    pub fn os(errno: Errno, doing: impl Into<String>) -> Self {
        let kind = match errno {
            Errno::ENOENT => ErrorKind::NotFound,
            Errno::EACCES | Errno::EPERM => ErrorKind::PermissionDenied,
            Errno::ENOSPC | Errno(122) => ErrorKind::NoSpace,
            Errno::EBUSY => ErrorKind::Busy,
            Errno::EROFS => ErrorKind::ReadOnly,
            Errno::ENOTSUP | Errno::ENOSYS => ErrorKind::Unsupported,
            Errno::EINVAL | Errno::EFBIG => ErrorKind::InvalidArgument,
            Errno::ECANCELED => ErrorKind::Cancelled,
            _ => ErrorKind::Io,
        };
        let mut error = Self::new(kind, doing);
        error.0.errno = Some(errno);
        error
    }

    /// From a `std::io::Error`; see [`Error::os`].
    pub fn io(error: &std::io::Error, doing: impl Into<String>) -> Self {
        match error.raw_os_error() {
            Some(errno) => Self::os(Errno(errno), doing),
            None => Self::new(ErrorKind::Io, format!("{}: {error}", doing.into())),
        }
    }

    /// Names the file, unless an inner layer has named it already.
    #[must_use]
    pub fn file(mut self, file: impl Into<String>) -> Self {
        self.0.file.get_or_insert_with(|| file.into());
        self
    }

    /// Names the field of the on-disk format or the option.
    #[must_use]
    pub fn field(mut self, field: &'static str) -> Self {
        self.0.field = Some(field);
        self
    }

    /// The offset in the file, in bytes.
    #[must_use]
    pub fn offset(mut self, offset: u64) -> Self {
        self.0.offset = Some(offset);
        self
    }

    /// The value that was found.
    #[must_use]
    pub fn value(mut self, value: impl fmt::Display) -> Self {
        self.0.value = Some(value.to_string());
        self
    }

    /// Sets the errno that [`Error::errno`] returns.
    #[must_use]
    pub fn with_errno(mut self, errno: Errno) -> Self {
        self.0.errno = Some(errno);
        self
    }

    /// Adds QEMU's sentence about damage of an image, for its log and its event `BLOCK_IMAGE_CORRUPTED`. It is no part of the text.
    #[must_use]
    pub fn with_report(mut self, sentence: impl Into<String>) -> Self {
        self.0.report = Some(sentence.into());
        self
    }

    /// QEMU's sentence about this damage, where it has one.
    pub fn report(&self) -> Option<&str> {
        self.0.report.as_deref()
    }

    /// Puts `context: ` before the message, and before QEMU's sentence.
    #[must_use]
    pub fn context(mut self, context: impl fmt::Display) -> Self {
        self.0.message = format!("{context}: {}", self.0.message);
        self.0.sentence = self.0.sentence.map(|sentence| format!("{context}: {sentence}"));
        self
    }

    /// Puts `part: ` before the message. QEMU's sentence stays as it is, where one is set.
    #[must_use]
    pub fn in_part(mut self, part: impl fmt::Display) -> Self {
        self.0.message = format!("{part}: {}", self.0.message);
        self
    }

    /// Sets QEMU's sentence for this error. Programs that carry a name of QEMU print it instead of the message.
    #[must_use]
    pub fn qemu(mut self, sentence: impl Into<String>) -> Self {
        self.0.sentence = Some(sentence.into());
        self
    }

    /// Appends to the message a part that QEMU's sentence lacks.
    #[must_use]
    pub fn hint(mut self, hint: impl fmt::Display) -> Self {
        let sentence = self.0.message.clone();
        self.0.message = format!("{sentence}{hint}");
        self.0.sentence.get_or_insert(sentence);
        self
    }

    /// The class.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// The message alone, without file, field and value.
    pub fn message(&self) -> &str {
        &self.0.message
    }

    /// QEMU's sentence, or the message where that is the same; with the system's words for the errno, without the file.
    /// Field, offset and value stay where this is no wrong argument and QEMU has no sentence.
    pub fn sentence(&self) -> String {
        let errno = self.0.errno.map(|errno| format!(": {}", system_words(errno))).unwrap_or_default();
        match (&self.0.sentence, self.0.kind) {
            (Some(sentence), _) => format!("{sentence}{errno}"),
            (None, ErrorKind::InvalidArgument) => format!("{}{errno}", self.0.message),
            (None, _) => format!("{}{errno}{}", self.0.message, self.0.details()),
        }
    }

    /// The file, if known.
    pub fn file_name(&self) -> Option<&str> {
        self.0.file.as_deref()
    }

    /// The field, if known.
    pub fn field_name(&self) -> Option<&'static str> {
        self.0.field
    }

    /// The system's errno, or the nearest one for the kind.
    pub fn errno(&self) -> Errno {
        self.0.errno.unwrap_or(match self.0.kind {
            ErrorKind::NotFound => Errno::ENOENT,
            ErrorKind::PermissionDenied => Errno::EACCES,
            ErrorKind::InvalidArgument | ErrorKind::InvalidImage | ErrorKind::Limit => Errno::EINVAL,
            ErrorKind::Unsupported => Errno::ENOTSUP,
            ErrorKind::NoSpace => Errno::ENOSPC,
            ErrorKind::Busy => Errno::EBUSY,
            ErrorKind::ReadOnly => Errno::EROFS,
            ErrorKind::Cancelled => Errno::ECANCELED,
            ErrorKind::Io | ErrorKind::Poisoned | ErrorKind::Internal => Errno::EIO,
        })
    }

    /// The QMP error class.
    pub fn qmp_class(&self) -> &'static str {
        "GenericError"
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let repr = &self.0;
        if let Some(file) = &repr.file {
            write!(f, "{file}: ")?;
        }
        match f.alternate() {
            true => f.write_str(&repr.message)?,
            false => f.write_str(&with_line_ends(&repr.message))?,
        }
        if let Some(errno) = repr.errno {
            write!(f, ": {}", system_words(errno))?;
        }
        f.write_str(&repr.details())
    }
}

impl Repr {
    /// ` (FIELD at offset OFFSET is VALUE)` without unknown parts; empty without any.
    fn details(&self) -> String {
        match (self.field, self.offset, &self.value) {
            (None, None, None) => String::new(),
            // The message names the value's subject.
            (None, None, Some(value)) => format!(" ({value})"),
            (field, offset, value) => {
                let mut words: Vec<String> = Vec::new();
                words.extend(field.map(str::to_owned));
                words.extend(offset.map(|offset| format!("at offset {offset:#x}")));
                words.extend(value.as_ref().map(|value| format!("is {value}")));
                format!(" ({})", words.join(" "))
            }
        }
    }
}

impl std::error::Error for Error {}

/// The system's words for the errno.
fn system_words(errno: Errno) -> String {
    let text = std::io::Error::from_raw_os_error(errno.0).to_string();
    text.split(" (os error").next().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn display_names_file_field_and_value() {
        let error = Error::invalid_image("cluster_bits", 33, "cluster size out of range").offset(20).file("a.qcow2");
        assert_eq!(error.to_string(), "a.qcow2: cluster size out of range (cluster_bits at offset 0x14 is 33)");
        assert_eq!(error.errno(), Errno::EINVAL);
        let nameless = Error::invalid_argument("the new size is too large").value(33).file("a.qcow2");
        assert_eq!(nameless.to_string(), "a.qcow2: the new size is too large (33)");
    }

    #[test]
    fn the_sentence_leaves_out_what_qemu_does_not_say() {
        let error = Error::invalid_argument("Unknown driver 'x'").hint(": one of raw, qcow2 is expected").file("a");
        assert_eq!(error.to_string(), "a: Unknown driver 'x': one of raw, qcow2 is expected");
        assert_eq!(error.sentence(), "Unknown driver 'x'");
        let error = Error::invalid_image("l1_size", 0, "too small").qemu("L1 table is too small").context("backing");
        assert_eq!(error.to_string(), "backing: too small (l1_size is 0)");
        assert_eq!(error.sentence(), "backing: L1 table is too small");
        let error = Error::os(Errno::ENOSPC, "could not write").offset(512);
        assert_eq!(error.sentence(), "could not write: No space left on device (at offset 0x200)");
        let error = Error::invalid_argument("not a power of two").field("cluster_size").value(3);
        assert_eq!(error.sentence(), "not a power of two");
        let error = Error::invalid_image("block_size", 3, "not a power of two").file("a.vhdx");
        assert_eq!(error.sentence(), "not a power of two (block_size is 3)");
    }

    #[test]
    fn os_errors_keep_their_errno() {
        let error = Error::os(Errno::ENOSPC, "could not write").file("b");
        assert_eq!(error.kind(), ErrorKind::NoSpace);
        assert_eq!(error.to_string(), "b: could not write: No space left on device");
    }
}
