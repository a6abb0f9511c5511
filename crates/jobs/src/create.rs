// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Creates images: a thin call of `cowshed_create`.

use crate::JobHandle;
pub use cowshed_create::{CreatePlan, CreateRequest, prepare};
use cowshed_types::Result;

/// Prepares and creates in one go.
pub async fn run(request: &CreateRequest, job: &JobHandle) -> Result<CreatePlan> {
    job.pause_point().await?;
    let plan = prepare(request).await?;
    plan.run().await?;
    Ok(plan)
}
