// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The turns of a queue's requests, between the driver and the server.
//!
//! ```text
//! New ─fetch─► Driver ─request─► Server ─commit─► Driver … ─the device stops─► Gone
//! ```

use crate::Malformed;

/// The number by which a wait ends when the device stops: `ENODEV`.
const STOPPED: i32 = -19;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Turn {
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
    turns: Vec<Turn>,
    with_server: u16,
    gone: u16,
}

impl Tags {
    /// The tags of a queue of this depth.
    pub fn new(depth: u16) -> Tags {
        Tags { turns: vec![Turn::New; depth.into()], with_server: 0, gone: 0 }
    }

    fn take(&mut self, tag: u16, from: Turn, what: &'static str) -> Result<&mut Turn, Malformed> {
        match self.turns.get_mut(usize::from(tag)) {
            Some(turn) if *turn == from => Ok(turn),
            _ => Err(Malformed { what, value: tag.into() }),
        }
    }

    /// The tag is fetched.
    ///
    /// # Errors
    /// An error where the driver had it already.
    pub fn fetch(&mut self, tag: u16) -> Result<(), Malformed> {
        *self.take(tag, Turn::New, "a tag is fetched twice")? = Turn::Driver;
        Ok(())
    }

    /// A wait for a request has ended with this result.
    ///
    /// # Errors
    /// Where no request was awaited.
    pub fn arrive(&mut self, tag: u16, result: i32) -> Result<Arrival, Malformed> {
        let turn = self.take(tag, Turn::Driver, "a request of a tag that the driver doesn't have")?;
        match result {
            0 => {
                *turn = Turn::Server;
                self.with_server += 1;
                Ok(Arrival::Request)
            }
            _ => {
                *turn = Turn::Gone;
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
        *self.take(tag, Turn::Server, "a result of a tag without a request")? = Turn::Driver;
        self.with_server -= 1;
        Ok(())
    }

    /// Number of requests that are carried out.
    pub fn running(&self) -> u16 {
        self.with_server
    }

    /// True where the driver uses none of them any more.
    pub fn is_over(&self) -> bool {
        usize::from(self.gone) == self.turns.len()
    }
}
