// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The throttle filters that commands put in.

use cowshed_image::Node;
use std::cell::RefCell;
use std::sync::{Arc, Weak};

/// Filters of the user are never taken out.
#[derive(Default)]
pub(crate) struct InsertedFilters(RefCell<Vec<Weak<Node>>>);

impl InsertedFilters {
    pub fn add(&self, filter: &Arc<Node>) {
        let mut filters = self.0.borrow_mut();
        filters.retain(|filter| filter.strong_count() > 0);
        filters.push(Arc::downgrade(filter));
    }

    pub fn contains(&self, filter: &Arc<Node>) -> bool {
        self.0.borrow().iter().any(|known| known.as_ptr() == Arc::as_ptr(filter))
    }
}
