// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Places where another thread could come between: a simulation of several threads takes its chance there.
//!
//! Only debug builds look for a hook; in a release build nothing is left of this.

#[cfg(debug_assertions)]
mod hook {
    use std::cell::Cell;

    thread_local! {
        static HOOK: Cell<Option<fn()>> = const { Cell::new(None) };
        static LOCKED: Cell<u64> = const { Cell::new(0) };
    }

    pub(super) fn count_lock() {
        let _ = LOCKED.try_with(|locked| locked.set(locked.get() + 1));
    }

    pub(super) fn locked() -> u64 {
        LOCKED.try_with(Cell::get).unwrap_or(0)
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

/// The times that this thread has taken an engine's lock while it had a hook. 0 in builds without debug assertions.
pub fn times_locked() -> u64 {
    #[cfg(debug_assertions)]
    return hook::locked();
    #[cfg(not(debug_assertions))]
    return 0;
}

/// A thread with a hook has taken the engine's lock.
pub(crate) fn count_lock() {
    #[cfg(debug_assertions)]
    hook::count_lock();
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
