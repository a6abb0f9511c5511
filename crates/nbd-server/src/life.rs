// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Whether further requests of a client may begin.

use cowshed_nbd::Stream;
use cowshed_storage::HangUp;
use cowshed_storage::rt::Cancel;
use cowshed_types::slip;
use std::cell::Cell;
use std::rc::Rc;

/// The state of one connection, shared by all that serve it.
#[derive(Debug)]
pub(crate) struct Life {
    /// The client has ended its direction.
    ending: Cell<bool>,
    /// The connection is dead.
    pub cancel: Rc<Cancel>,
}

impl Life {
    pub(crate) fn new() -> Rc<Life> {
        Rc::new(Life { ending: Cell::new(false), cancel: Cancel::new() })
    }

    /// True when no request begins any more, whatever has been received.
    pub(crate) fn is_dead(&self) -> bool {
        self.cancel.is_cancelled()
    }

    /// True when the client sends nothing more. Received requests begin only when a goodbye is at their end.
    pub(crate) fn is_ending(&self) -> bool {
        self.ending.get() && !slip!("requests_of_a_dead_connection")
    }

    /// A reply could not be sent, or the connection was reset.
    pub(crate) fn die(&self, stream: &Stream) {
        if !slip!("requests_of_a_dead_connection") {
            self.cancel.cancel();
        }
        // Ends the receive that is waiting, and the send.
        stream.socket().shutdown();
    }

    /// Notes the end of the connection when it comes.
    pub(crate) async fn watch(&self, stream: &Stream) {
        match stream.socket().hung_up().await {
            HangUp::End => self.ending.set(true),
            HangUp::Broken => self.die(stream),
        }
    }
}
