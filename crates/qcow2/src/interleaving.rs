// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Places where another thread could come between: a simulation of several threads takes its chance there.
//!
//! Only debug builds look for a hook; in a release build nothing is left of this.

#[cfg(debug_assertions)]
mod hook {
    use std::cell::Cell;

    thread_local! {
        static HOOK: Cell<Option<fn()>> = const { Cell::new(None) };
    }

    pub(super) fn set(hook: Option<fn()>) {
        HOOK.set(hook);
    }

    pub(super) fn get() -> Option<fn()> {
        HOOK.try_with(Cell::get).ok().flatten()
    }
}

/// Has `hook` called on this thread wherever another thread could come between; `None`: no more. For simulations; does
/// nothing in builds without debug assertions. The hook may let other threads run until it returns.
pub fn set_interleaving_hook(hook: Option<fn()>) {
    #[cfg(debug_assertions)]
    hook::set(hook);
    #[cfg(not(debug_assertions))]
    let _ = hook;
}

/// Another thread could come between here.
#[inline(always)]
pub(crate) fn point() {
    #[cfg(debug_assertions)]
    if let Some(hook) = hook::get() {
        hook();
    }
}

/// True on threads of a simulation, which must not block in the operating system while another holds a lock.
#[inline(always)]
pub(crate) fn is_simulated() -> bool {
    #[cfg(debug_assertions)]
    return hook::get().is_some();
    #[cfg(not(debug_assertions))]
    return false;
}
