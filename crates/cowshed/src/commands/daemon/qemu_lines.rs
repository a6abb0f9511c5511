// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Lines of the log that QEMU's programs print as messages.

use cowshed_daemon::{LOG_LOST, LOG_REFUSED};
use cowshed_types::visible_name;
use std::fmt::{self, Debug, Write};
use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

/// The field with the cause, and QEMU's words in front of it, by the target of a line.
const MESSAGES: [(&str, &str, &str); 2] =
    [(LOG_REFUSED, "sentence", "option negotiation failed"), (LOG_LOST, "error", "Disconnect client, due to")];

/// Messages of QEMU about clients as there, and all other lines in the form `F`.
pub struct QemuLines<F> {
    /// The program's name.
    pub program: &'static str,
    /// The form.
    pub form: F,
}

/// The text of one field.
struct Cause {
    field: &'static str,
    text: String,
}

impl Visit for Cause {
    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == self.field {
            value.clone_into(&mut self.text);
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        if field.name() == self.field {
            // Memory takes all that is written to it.
            let _ = write!(self.text, "{value:?}");
        }
    }
}

impl<S, N, F> FormatEvent<S, N> for QemuLines<F>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
    F: FormatEvent<S, N>,
{
    fn format_event(&self, context: &FmtContext<'_, S, N>, mut writer: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        let target = event.metadata().target();
        let Some(&(_, field, words)) = MESSAGES.iter().find(|(known, ..)| *known == target) else {
            return self.form.format_event(context, writer, event);
        };
        let mut cause = Cause { field, text: String::new() };
        event.record(&mut cause);
        writeln!(writer, "{}: {words}: {}", self.program, visible_name(&cause.text))
    }
}
