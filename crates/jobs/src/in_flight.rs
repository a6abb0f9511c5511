// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The number of pieces in flight.

use std::cell::Cell;
use std::time::Duration;

/// Pieces in flight among the first [`FEW`]: one is read while another is written, and little memory is touched.
const FIRST: usize = 2;
/// The number of pieces, each done at once, that counts as few.
const FEW: u32 = 16;
/// Pieces that take no longer are done at once: they are in the page cache. Handing the first few of those to another
/// core, which has to be woken for each, takes longer than writing them.
const AT_ONCE: Duration = Duration::from_micros(500);
/// Pieces that keep two cores busy where all is in the page cache, with one in hand while a core waits.
const QUICK: usize = 4;
/// A piece that took longer has waited for a disk, a server or a codec: more in flight are worth their buffers.
const SLOW: Duration = Duration::from_millis(2);

/// Begins with one piece, for each has a buffer, whose fresh pages cost more than the copying where little is copied.
#[derive(Debug)]
pub struct InFlight {
    now: Cell<usize>,
    most: usize,
    /// See [`InFlight::begins_alone`].
    begins_alone: bool,
    /// Pieces that are done; stops at [`FEW`].
    done: Cell<u32>,
}

impl InFlight {
    /// `most` at the end, at least 1.
    pub fn up_to(most: usize) -> InFlight {
        InFlight { now: Cell::new(1), most: most.max(1), begins_alone: false, done: Cell::new(0) }
    }

    /// For a caller that needs no other core while [`InFlight::is_alone`]: the first [`FEW`] pieces stay alone while each
    /// is done [`AT_ONCE`].
    pub fn begins_alone(self) -> InFlight {
        InFlight { begins_alone: true, ..self }
    }

    /// No piece has waited for anything so far.
    pub fn is_quick(&self) -> bool {
        self.now.get() <= QUICK
    }

    /// The present limit.
    pub fn now(&self) -> usize {
        self.now.get()
    }

    /// Notes the time of a piece.
    pub fn note(&self, took: Duration) {
        let done = FEW.min(self.done.get() + 1);
        self.done.set(done);
        let now = self.now.get();
        let wanted = match done < FEW {
            true if self.begins_alone && took <= AT_ONCE => 1,
            true => FIRST,
            false => QUICK,
        };
        if now < wanted || took > SLOW {
            self.now.set(self.most.min(now + 1));
        }
    }

    /// So few pieces are done, all at once, that another core's help isn't worth its waking.
    pub fn is_alone(&self) -> bool {
        self.begins_alone && self.now.get() == 1 && self.done.get() < FEW
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(most: usize, took: Duration, pieces: usize) -> usize {
        let in_flight = InFlight::up_to(most);
        assert_eq!(in_flight.now(), 1);
        (0..pieces).for_each(|_| in_flight.note(took));
        in_flight.now()
    }

    #[test]
    fn slow_pieces_raise_the_number_in_flight() {
        assert_eq!(after(8, Duration::ZERO, 1), FIRST);
        assert_eq!(after(8, SLOW, FEW as usize - 1), FIRST);
        assert_eq!(after(8, SLOW, FEW as usize), FIRST + 1);
        assert_eq!(after(8, SLOW, 100), QUICK);
        assert_eq!(after(8, 2 * SLOW, 6), 7);
        assert_eq!(after(8, 2 * SLOW, 100), 8);
        let in_flight = InFlight::up_to(8);
        (0..100).for_each(|_| in_flight.note(SLOW));
        assert!(in_flight.is_quick());
        in_flight.note(2 * SLOW);
        assert!(!in_flight.is_quick());
    }

    #[test]
    fn help_is_for_many_pieces_or_slow_ones() {
        let in_flight = InFlight::up_to(8).begins_alone();
        for _ in 1..FEW {
            in_flight.note(AT_ONCE);
            assert!(in_flight.is_alone());
            assert_eq!(in_flight.now(), 1);
        }
        in_flight.note(AT_ONCE);
        assert!(!in_flight.is_alone());
        assert_eq!(in_flight.now(), FIRST);
        (0..100).for_each(|_| in_flight.note(AT_ONCE));
        assert_eq!(in_flight.now(), QUICK);
        let in_flight = InFlight::up_to(8).begins_alone();
        in_flight.note(AT_ONCE + Duration::from_nanos(1));
        assert!(!in_flight.is_alone());
        assert_eq!(in_flight.now(), FIRST);
        assert!(!InFlight::up_to(8).is_alone());
    }

    #[test]
    fn never_more_than_asked_for_and_never_none() {
        assert_eq!(after(2, Duration::ZERO, 100), 2);
        assert_eq!(after(1, Duration::MAX, 100), 1);
        assert_eq!(after(0, Duration::MAX, 100), 1);
    }
}
