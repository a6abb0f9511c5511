// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Slots of the requests in flight. The future of a request and the lists of its chain serve the next request, too. So a ring that has
//! been as deep before allocates none of them.

use crate::queue::RingRules;
use crate::requests::{self, Ended};
use cowshed_image::graph::Queue as Disk;
use cowshed_vhost_user_proto::request::Request;
use cowshed_vhost_user_proto::{DescriptorChain, Shared};
use futures_util::StreamExt;
use futures_util::future::LocalBoxFuture;
use futures_util::stream::FuturesUnordered;
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::poll_fn;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

/// The most slots that stay when their requests have ended. A request of a deeper ring has its future for itself.
const MAX_KEPT: usize = 128;

/// The slots of a ring, as many as it had requests in flight at a time.
pub(crate) struct RequestSlots<P> {
    kept: Vec<Rc<RequestSlot<P>>>,
    /// The numbers of those without a request.
    free: Vec<usize>,
    in_flight: usize,
    /// The future of each slot, and those of requests without one.
    futures: FuturesUnordered<LocalBoxFuture<'static, ()>>,
    done: Rc<RefCell<VecDeque<EndedInSlot<P>>>>,
    /// Chains whose requests have ended.
    chains: Vec<DescriptorChain<P>>,
}

/// One request after the other.
struct RequestSlot<P> {
    next: Cell<Option<(DescriptorChain<P>, Request)>>,
    /// Of the future, once it has waited for a request.
    waker: RefCell<Option<Waker>>,
}

/// The end of a request.
struct EndedInSlot<P> {
    /// Of its slot.
    number: Option<usize>,
    chain: DescriptorChain<P>,
    ended: Ended,
}

impl<P: Shared + 'static> RequestSlots<P> {
    pub fn new() -> RequestSlots<P> {
        RequestSlots {
            kept: Vec::new(),
            free: Vec::new(),
            in_flight: 0,
            futures: FuturesUnordered::new(),
            done: Rc::default(),
            chains: Vec::new(),
        }
    }

    /// A chain to walk into.
    pub fn take_chain(&mut self) -> DescriptorChain<P> {
        self.chains.pop().unwrap_or_default()
    }

    /// Takes a chain back, whose request has ended.
    pub fn keep_chain(&mut self, mut chain: DescriptorChain<P>) {
        // The guest's memory can be unmapped from here on.
        chain.clear();
        if self.chains.len() < MAX_KEPT {
            self.chains.push(chain);
        }
    }

    /// No request is in flight.
    pub fn is_empty(&self) -> bool {
        self.in_flight == 0
    }

    /// Begins a request; it goes on in [`RequestSlots::poll_ended`].
    pub fn begin(&mut self, disk: &Disk, ways: &Rc<RingRules<P>>, chain: DescriptorChain<P>, request: Request) {
        self.in_flight += 1;
        if let Some(number) = self.free.pop() {
            let slot = &self.kept[number];
            slot.next.set(Some((chain, request)));
            if let Some(waker) = &*slot.waker.borrow() {
                waker.wake_by_ref();
            }
            return;
        }
        let (disk, ways, done) = (disk.clone(), Rc::clone(ways), Rc::clone(&self.done));
        if self.kept.len() >= MAX_KEPT {
            self.futures.push(Box::pin(async move {
                let ended = requests::run(&disk, &ways, &chain, request).await;
                done.borrow_mut().push_back(EndedInSlot { number: None, chain, ended });
            }));
            return;
        }
        let number = self.kept.len();
        let slot = Rc::new(RequestSlot { next: Cell::new(Some((chain, request))), waker: RefCell::new(None) });
        self.kept.push(Rc::clone(&slot));
        self.futures.push(Box::pin(async move {
            loop {
                let (chain, request) = poll_fn(|context| slot.poll_next(context)).await;
                let ended = requests::run(&disk, &ways, &chain, request).await;
                done.borrow_mut().push_back(EndedInSlot { number: Some(number), chain, ended });
            }
        }));
    }

    /// Lets requests go on; the next one that has ended. `None`: none is in flight.
    pub fn poll_ended(&mut self, context: &mut Context<'_>) -> Poll<Option<Ended>> {
        if self.is_empty() {
            return Poll::Ready(None);
        }
        if self.done.borrow().is_empty() {
            // A future that ends belonged to one request.
            while let Poll::Ready(Some(())) = self.futures.poll_next_unpin(context) {}
        }
        let done = self.done.borrow_mut().pop_front();
        match done {
            None => Poll::Pending,
            Some(EndedInSlot { number, chain, ended }) => {
                self.in_flight -= 1;
                self.free.extend(number);
                self.keep_chain(chain);
                Poll::Ready(Some(ended))
            }
        }
    }
}

impl<P> RequestSlot<P> {
    fn poll_next(&self, context: &mut Context<'_>) -> Poll<(DescriptorChain<P>, Request)> {
        if let Some(next) = self.next.take() {
            return Poll::Ready(next);
        }
        let mut waker = self.waker.borrow_mut();
        if !waker.as_ref().is_some_and(|waker| waker.will_wake(context.waker())) {
            *waker = Some(context.waker().clone());
        }
        Poll::Pending
    }
}
