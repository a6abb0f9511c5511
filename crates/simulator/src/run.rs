// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Running futures on a simulated machine.

use super::world::{Step, World};
use cowshed_storage::simulated::SimulatedFile;
use cowshed_storage::{OpenOptions, rt};
use cowshed_types::Result;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

impl World {
    /// Runs `future` to its end on this machine, with an executor of its own: [`cowshed_storage::File::open`] opens the
    /// machine's files, and time is virtual. Tasks that have not ended then are dropped.
    ///
    /// # Panics
    /// When all tasks wait and nothing is under way that could wake one, and inside of another run.
    pub fn run<F: Future>(&self, future: F) -> F::Output {
        rt::Local::simulated(Rc::new(Machine(self.clone()))).block_on(future)
    }
}

struct Machine(World);

impl rt::Simulation for Machine {
    fn advance(&self) {
        if self.0.step() == Step::Idle {
            panic!("nothing can wake the tasks that are left: {}", self.0.describe_pending());
        }
    }

    fn sleep(&self, duration: Duration) -> Pin<Box<dyn Future<Output = ()>>> {
        Box::pin(self.0.sleep(duration))
    }

    fn now(&self) -> Duration {
        self.0.now()
    }

    fn open(&self, name: &str, options: &OpenOptions) -> Option<Result<Arc<dyn SimulatedFile>>> {
        // A machine has no other files: a name that isn't there is an error, not a file of the host.
        Some(self.0.open_dyn(name, options))
    }

    fn sync_folder(&self) -> bool {
        self.0.sync_folder();
        true
    }
}
