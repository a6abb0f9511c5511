// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Chains of images: the layer that decides about the data of a range.

use super::{ChildRole, Node};
use cowshed_types::{Error, Result};
use std::sync::Arc;

/// The images of a chain from a top down to the one above a base, with the filters between them.
#[derive(Clone, Debug)]
pub struct Chain {
    layers: Vec<Arc<Node>>,
    filters: Vec<Arc<Node>>,
    base: Option<Arc<Node>>,
    /// Names of filters that are no part of it.
    left_out: Vec<String>,
}

/// The layer that decides how the first bytes of a range read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holder {
    /// Length of the range in bytes, at least one.
    pub len: u64,
    /// The layer, counted from the top; `None`: the base, or nothing at all without a base.
    pub layer: Option<usize>,
    /// It reads as zeroes, as far as that is known without reading. A layer that ends above the range holds zeroes.
    pub zero: bool,
}

impl Chain {
    /// From `top` down to `base`, or to the end without one. `InvalidArgument` when the base isn't below the top.
    pub fn between(top: &Arc<Node>, base: Option<&Arc<Node>>) -> Result<Chain> {
        let (mut layers, mut filters) = (Vec::new(), Vec::new());
        let mut next = Some(Arc::clone(top));
        while let Some(node) = next {
            if base.is_some_and(|base| Arc::ptr_eq(base, &node)) && !layers.is_empty() {
                return Ok(Chain { layers, filters, base: base.cloned(), left_out: Vec::new() });
            }
            next = if node.is_filter() { node.child(ChildRole::File) } else { node.backing() };
            if node.is_filter() { filters.push(node) } else { layers.push(node) }
        }
        match base {
            None => Ok(Chain { layers, filters, base: None, left_out: Vec::new() }),
            Some(base) => {
                let message = format!("'{}' is not in the backing chain of '{}'", base.name(), top.name());
                Err(Error::invalid_argument(message))
            }
        }
    }

    /// The images, top first, without the base. At least one.
    pub fn layers(&self) -> &[Arc<Node>] {
        &self.layers
    }

    /// The image below the lowest layer.
    pub fn base(&self) -> Option<&Arc<Node>> {
        self.base.as_ref()
    }

    /// The layer directly above the base.
    pub fn lowest(&self) -> Option<&Arc<Node>> {
        self.layers.last()
    }

    /// All nodes of it: layers, filters and the base.
    pub fn nodes(&self) -> Vec<Arc<Node>> {
        self.layers.iter().chain(&self.filters).chain(&self.base).cloned().collect()
    }

    /// Without these filters. They may be between its ends all the same.
    pub fn leaving_out(mut self, filters: &[Arc<Node>]) -> Chain {
        self.filters.retain(|filter| !filters.iter().any(|gone| Arc::ptr_eq(gone, filter)));
        self.left_out.extend(filters.iter().map(|filter| filter.name().to_owned()));
        self
    }

    /// See [`Chain::leaving_out`].
    pub(crate) fn left_out(&self) -> &[String] {
        &self.left_out
    }

    /// The layers below the top, upper ones first, then the filters between; without the base.
    pub(crate) fn between_ends(&self) -> Vec<Arc<Node>> {
        self.layers.iter().skip(1).chain(&self.filters).cloned().collect()
    }

    /// The layer that decides about the bytes from `at` on, at most `len` of them. They must be inside of the top.
    pub async fn holder(&self, at: u64, len: u64) -> Result<Holder> {
        let mut len = len;
        for (number, layer) in self.layers.iter().enumerate() {
            let inside = layer.size().saturating_sub(at).min(len);
            if inside == 0 {
                return Ok(Holder { len, layer: Some(number), zero: true });
            }
            let runs = layer.block_status_boxed(at, inside, 1).await?;
            let run = runs.first().ok_or_else(|| Error::internal("a map without progress").offset(at))?;
            len = run.len.min(inside);
            if run.present {
                return Ok(Holder { len, layer: Some(number), zero: run.zero });
            }
        }
        Ok(Holder { len, layer: None, zero: self.base.is_none() })
    }

    /// True when the top must record zeroes of the layers below it. With a base it would show that instead. Without one
    /// it reads as zeroes anyway, but another backing file may come later. Only version 2 has no means to record zeroes
    /// without writing data.
    pub fn records_zeroes(&self) -> bool {
        self.base.is_some() || self.layers.first().is_some_and(|top| top.records_zeroes())
    }
}
