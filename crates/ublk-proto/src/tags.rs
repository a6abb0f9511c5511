// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The holder of each tag of a queue: the driver or the server.
//!
//! ```text
//! New ─fetch─► Driver ─request─► Server ─commit─► Driver … ─the device stops─► Gone
//! ```

use crate::Malformed;

/// The number by which a wait ends when the device stops: `ENODEV`.
const STOPPED: i32 = -19;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TagHolder {
    /// The server has not fetched the tag yet.
    New,
    /// The driver has it, and fills it with a request.
    Driver,
    /// A request of it is carried out.
    Server,
    /// The driver uses it no more.
    Gone,
}

/// The meaning of the end of a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrival {
    /// There is a request.
    Request,
    /// The device stops, and the tag has no more requests.
    Stopped,
    /// The driver refuses the command, by this number of an error.
    Refused(i32),
}

/// The tags of one queue.
#[derive(Clone, Debug)]
pub struct Tags {
    holders: Vec<TagHolder>,
    with_server: u16,
    gone: u16,
}

impl Tags {
    /// The tags of a queue of this depth.
    pub fn new(depth: u16) -> Tags {
        Tags { holders: vec![TagHolder::New; depth.into()], with_server: 0, gone: 0 }
    }

    fn take(&mut self, tag: u16, from: TagHolder, what: &'static str) -> Result<&mut TagHolder, Malformed> {
        match self.holders.get_mut(usize::from(tag)) {
            Some(holder) if *holder == from => Ok(holder),
            _ => Err(Malformed { what, value: tag.into() }),
        }
    }

    /// The tag is fetched.
    ///
    /// # Errors
    /// An error where the driver had it already.
    pub fn fetch(&mut self, tag: u16) -> Result<(), Malformed> {
        *self.take(tag, TagHolder::New, "a tag is fetched twice")? = TagHolder::Driver;
        Ok(())
    }

    /// A wait for a request has ended with this result.
    ///
    /// # Errors
    /// Where no request was awaited.
    pub fn arrive(&mut self, tag: u16, result: i32) -> Result<Arrival, Malformed> {
        let holder = self.take(tag, TagHolder::Driver, "a request of a tag that the driver doesn't have")?;
        match result {
            0 => {
                *holder = TagHolder::Server;
                self.with_server += 1;
                Ok(Arrival::Request)
            }
            _ => {
                *holder = TagHolder::Gone;
                self.gone += 1;
                Ok(if result == STOPPED { Arrival::Stopped } else { Arrival::Refused(result.saturating_neg()) })
            }
        }
    }

    /// The result of a request is given.
    ///
    /// # Errors
    /// Where there was none.
    pub fn commit(&mut self, tag: u16) -> Result<(), Malformed> {
        *self.take(tag, TagHolder::Server, "a result of a tag without a request")? = TagHolder::Driver;
        self.with_server -= 1;
        Ok(())
    }

    /// Number of requests that are carried out.
    pub fn running(&self) -> u16 {
        self.with_server
    }

    /// True where the driver uses none of them any more.
    pub fn is_over(&self) -> bool {
        usize::from(self.gone) == self.holders.len()
    }
}
