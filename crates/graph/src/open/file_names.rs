// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The file names that a driver reads and shows by itself: `WORD:REST`, or an address. A fact of the driver's line.

use super::drivers::Drivers;
use super::names::{no_file_name, protocol, protocol_options};
use super::policy::Files;
use crate::options::{BlockdevOptions, nbd_of_uri, schemas};
use cowshed_nbd_proto::NbdUri;
use cowshed_types::{Error, Result};

/// The file names of a driver.
#[derive(Clone, Copy)]
pub struct FileNames {
    /// The text before the colon.
    word: &'static str,
    /// Recognises names that may begin otherwise.
    claims: Option<fn(&str) -> bool>,
    read: fn(&NameParts<'_>) -> Result<BlockdevOptions>,
    pub(super) without_word: WithoutWord,
    pub(super) shown: ShownName,
    /// Files can be made under such names.
    pub(super) makes_files: bool,
}

/// A name without the word, where the options name the driver.
#[derive(Clone, Copy)]
pub enum WithoutWord {
    /// It is the path of the file, and so is the rest of a name with the word.
    Path,
    /// It is refused in these words.
    Refused(fn(&str) -> String),
    /// It is the name of the child with this key.
    Child(&'static str),
    /// It is no name of this driver.
    Other,
}

/// The plain name of a node.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum ShownName {
    /// Its file's.
    File,
    /// Its server's address, where that says all.
    Address,
    /// The word alone, where no option counts.
    Word,
    /// It is put together from the names of its children.
    Children,
}

/// A name that is read.
pub struct NameParts<'a> {
    /// The drivers of the program.
    pub(super) drivers: &'a Drivers,
    /// The driver that reads it.
    pub driver: &'static str,
    /// All of the name.
    pub name: &'a str,
    /// The text behind the word and its colon.
    pub rest: &'a str,
    pub(super) files: &'a dyn Files,
}

impl FileNames {
    /// Names that begin with a word. They are the names of one node without a file.
    pub const fn beginning_with(
        word: &'static str,
        read: fn(&NameParts<'_>) -> Result<BlockdevOptions>,
        without_word: WithoutWord,
    ) -> FileNames {
        FileNames { word, claims: None, read, without_word, shown: ShownName::File, makes_files: false }
    }

    /// Paths, with the word in front or without.
    pub(super) const fn paths(word: &'static str, read: fn(&NameParts<'_>) -> Result<BlockdevOptions>) -> FileNames {
        FileNames { makes_files: true, ..FileNames::beginning_with(word, read, WithoutWord::Path) }
    }

    pub(super) const fn shown_as(self, shown: ShownName) -> FileNames {
        FileNames { shown, ..self }
    }

    /// True for a name that this driver reads.
    pub(super) fn claims(&self, name: &str) -> bool {
        self.claims.map_or_else(|| protocol(name) == Some(self.word), |claims| claims(name))
    }

    /// The name without the word and its colon, if they are there.
    pub(super) fn strip<'a>(&self, name: &'a str) -> &'a str {
        name.strip_prefix(self.word).and_then(|rest| rest.strip_prefix(':')).unwrap_or(name)
    }

    /// Reads a name that it claims.
    pub(super) fn read(
        &self,
        (drivers, driver): (&Drivers, &'static str),
        name: &str,
        files: &dyn Files,
    ) -> Result<BlockdevOptions> {
        (self.read)(&NameParts { drivers, driver, name, rest: self.strip(name), files })
    }
}

impl NameParts<'_> {
    /// The options of a node of the driver.
    pub fn node(&self) -> BlockdevOptions {
        BlockdevOptions::new().with("driver", self.driver)
    }

    /// The options of the node that a part of the name means.
    pub(super) fn part(&self, name: &str) -> Result<BlockdevOptions> {
        protocol_options(self.drivers, name, self.files)
    }

    pub(super) fn file(&self) -> Result<BlockdevOptions> {
        // Under the name that is shown it can be opened again.
        match protocol(self.rest) {
            Some(_) => self.part(&format!("./{}", self.rest)),
            None if self.rest.is_empty() => Err(no_file_name(self.name)),
            None => self.part(self.rest),
        }
    }
}

/// NBD's URIs and older addresses.
pub(super) const ADDRESSES: FileNames = FileNames {
    claims: Some(NbdUri::is_one),
    makes_files: true,
    ..FileNames::beginning_with(
        schemas::NBD.name,
        |parts| Ok(nbd_of_uri(&NbdUri::parse(parts.name)?)),
        WithoutWord::Refused(|name| match name.contains("://") {
            true => "No valid URL specified".to_owned(),
            false => "File name string for NBD must start with 'nbd:'".to_owned(),
        }),
    )
    .shown_as(ShownName::Address)
};

/// A disk without storage has no name but the word.
pub(super) const fn only_word(word: &'static str, refused: fn(&str) -> String) -> FileNames {
    let read = |parts: &NameParts<'_>| match parts.rest {
        "//" => Ok(parts.node()),
        _ => {
            let driver = parts.driver;
            let message = format!("the name of a {driver} disk is '{driver}://'");
            Err(Error::invalid_argument(message).file(parts.name).qemu(only_allowed(driver)))
        }
    };
    FileNames::beginning_with(word, read, WithoutWord::Refused(refused)).shown_as(ShownName::Word)
}

pub(super) fn only_allowed(driver: &str) -> String {
    format!("The only allowed filename for this driver is '{driver}://'")
}

/// `blkdebug:CONFIG:FILE`, with or without a file of rules.
pub(super) const RULES_AND_FILE: FileNames = FileNames::beginning_with(
    schemas::BLKDEBUG.name,
    |parts| {
        let Some((config, file)) = parts.rest.split_once(':') else {
            let message = "the name is 'blkdebug:CONFIG:FILE', with or without a file of rules as CONFIG";
            let error = Error::invalid_argument(message).file(parts.name);
            return Err(error.qemu("blkdebug requires both config file and image path"));
        };
        let node = parts.node().with("image", parts.part(file)?);
        Ok(if config.is_empty() { node } else { node.with("config", config) })
    },
    WithoutWord::Child("image"),
)
.shown_as(ShownName::Children);

/// `blkverify:RAW:TEST`.
pub(super) const TWO_FILES: FileNames = FileNames::beginning_with(
    schemas::VERIFY.name,
    |parts| {
        let Some((raw, test)) = parts.rest.split_once(':') else {
            let error = Error::invalid_argument("the name is 'blkverify:RAW:TEST'").file(parts.name);
            return Err(error.qemu("blkverify requires raw copy and original image path"));
        };
        let test = BlockdevOptions::new().with("file", parts.part(test)?);
        Ok(parts.node().with("raw", parts.part(raw)?).with("test", test))
    },
    WithoutWord::Other,
)
.shown_as(ShownName::Children);
