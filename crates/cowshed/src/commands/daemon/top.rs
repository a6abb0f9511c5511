// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `top`: the work of a daemon's exports, live.

use super::super::Verb;
use super::keys::Keys;
use crate::output::size::human;
use crate::output::{Console, Failure};
use clap::{ArgMatches, Args, FromArgMatches};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, IsTerminal, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

pub const VERB: Verb = Verb {
    name: "top",
    about: "Show live what the exports of a daemon do",
    operands: "SOCKET",
    details: "SOCKET is the path of a QMP monitor (cowshed serve --monitor SOCKET). For each export it shows operations and bytes \
              a second and their average latency, and requests in flight. These are the average, or those of the moment where they are more. It also shows requests that limits held back a second, \
              and look-ups of the mapping that found it in memory. The last line \
              is the memory that the metadata of all images takes and may take. On a terminal the screen is drawn anew each time, and \
              q ends; one of fewer than 118 columns gets a table of 60.",
    examples: "  cowshed top qmp.sock
  cowshed top --interval 0.5 --count 10 qmp.sock",
    in_qemu_img: false,
    arguments: TopArgs::augment_args,
    run,
};

#[derive(Args, Clone, Debug)]
struct TopArgs {
    /// Seconds between two looks
    #[arg(short, long, value_name = "SECONDS", default_value_t = 1.0)]
    interval: f64,
    /// End after this many looks [default: never]
    #[arg(short = 'n', long, value_name = "N")]
    count: Option<u64>,
    /// The monitor's socket
    #[arg(value_name = "SOCKET", value_hint = clap::ValueHint::FilePath)]
    socket: Vec<String>,
}

/// A conversation with a monitor.
struct Monitor {
    stream: BufReader<UnixStream>,
    path: String,
}

impl Monitor {
    fn connect(path: &str) -> Result<Monitor, Failure> {
        let stream =
            UnixStream::connect(path).map_err(|error| Failure::new(format!("{path}: could not connect: {error}")))?;
        let mut monitor = Monitor { stream: BufReader::new(stream), path: path.to_owned() };
        let greeting = monitor.message()?;
        if greeting.get("QMP").is_none() {
            return Err(Failure::new(format!("{path}: this is no QMP monitor")));
        }
        monitor.execute("qmp_capabilities")?;
        Ok(monitor)
    }

    fn failed(&self, what: &str) -> Failure {
        Failure::new(format!("{}: {what}", self.path))
    }

    fn message(&mut self) -> Result<Value, Failure> {
        let mut line = String::new();
        match self.stream.read_line(&mut line) {
            Ok(0) => Err(self.failed("the daemon has ended")),
            Ok(_) => serde_json::from_str(&line).map_err(|_| self.failed("this is no QMP monitor")),
            Err(error) => Err(self.failed(&error.to_string())),
        }
    }

    fn execute(&mut self, command: &str) -> Result<Value, Failure> {
        let text = json!({"execute": command}).to_string();
        let sent = self.stream.get_mut().write_all(text.as_bytes());
        sent.map_err(|error| self.failed(&error.to_string()))?;
        loop {
            let mut message = self.message()?;
            if let Some(error) = message.get("error") {
                return Err(self.failed(error["desc"].as_str().unwrap_or("the command failed")));
            }
            if message.get("return").is_some() {
                return Ok(message["return"].take());
            }
        }
    }
}

/// The shown numbers of an export, as counted since its start.
#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    operations: u64,
    bytes: u64,
    time_ns: u64,
}

impl Counts {
    fn of(stats: &Value, kind: &str) -> Counts {
        let number = |key: String| stats[&key].as_u64().unwrap_or(0);
        Counts {
            operations: number(format!("{kind}_operations")),
            bytes: number(format!("{kind}_bytes")),
            time_ns: number(format!("{kind}_total_time_ns")),
        }
    }

    fn since(self, before: Counts) -> Counts {
        Counts {
            operations: self.operations.saturating_sub(before.operations),
            bytes: self.bytes.saturating_sub(before.bytes),
            time_ns: self.time_ns.saturating_sub(before.time_ns),
        }
    }

    /// Operations and bytes a second.
    fn rates(self, seconds: f64) -> (String, String) {
        (format!("{:.0}", self.operations as f64 / seconds), human((self.bytes as f64 / seconds) as u64))
    }

    /// On average, in milliseconds.
    fn latency_ms(self) -> f64 {
        if self.operations == 0 { 0.0 } else { self.time_ns as f64 / self.operations as f64 / 1e6 }
    }

    /// Operations a second, bytes a second, average latency in milliseconds.
    fn cells(self, seconds: f64) -> String {
        let (rate, bytes) = self.rates(seconds);
        format!("{rate:>9} {bytes:>10} {:>8.3}", self.latency_ms())
    }
}

/// The counts of an export's nodes: throttle filters and mapping caches, also those below.
#[derive(Clone, Copy, Debug, Default)]
struct Nodes {
    waits: u64,
    hits: u64,
    misses: u64,
}

impl Nodes {
    fn of(stats: &Value) -> Nodes {
        let number = |value: &Value| value.as_u64().unwrap_or(0);
        let mut sum = Nodes {
            waits: number(&stats["x-throttle"]["waits"]),
            hits: number(&stats["x-cache"]["l2-hits"]),
            misses: number(&stats["x-cache"]["l2-misses"]),
        };
        for below in ["parent", "backing"].iter().map(|key| &stats[*key]).filter(|below| below.is_object()) {
            let below = Nodes::of(below);
            sum = Nodes {
                waits: sum.waits + below.waits,
                hits: sum.hits + below.hits,
                misses: sum.misses + below.misses,
            };
        }
        sum
    }

    fn since(self, before: Nodes) -> Nodes {
        Nodes {
            waits: self.waits.saturating_sub(before.waits),
            hits: self.hits.saturating_sub(before.hits),
            misses: self.misses.saturating_sub(before.misses),
        }
    }

    /// Waits a second, and hits in percent.
    fn cells(self, seconds: f64) -> String {
        let looks = self.hits + self.misses;
        let hits = match looks {
            0 => "-".to_owned(),
            looks => format!("{:.1}", self.hits as f64 * 100.0 / looks as f64),
        };
        format!("{:>8.0} {hits:>6}", self.waits as f64 / seconds)
    }
}

/// An export as counted since its start.
#[derive(Clone, Copy, Debug, Default)]
struct Look {
    counts: [Counts; 2],
    nodes: Nodes,
    /// Requests in flight at the look; others' daemons don't tell.
    in_flight: u64,
}

/// The memory of all images, and its limit.
fn budget_line(budget: &Value) -> String {
    let number = |key: &str| budget[key].as_u64().unwrap_or(0);
    let (used, limit) = (human(number("used-bytes")), human(number("limit-bytes")));
    let images = number("images");
    let plural = if images == 1 { "" } else { "s" };
    format!("memory: {used} of {limit} for the metadata of {images} image{plural}")
}

/// Columns of the whole table. A narrower terminal gets a table of [`NARROW_COLUMNS`].
const WIDE_COLUMNS: u16 = 118;
#[cfg(test)]
const NARROW_COLUMNS: usize = 60;
/// The first figures cover this much time, or one interval where that is less.
const FIRST_SECONDS: f64 = 0.25;

/// Tables for wide and for narrow terminals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Width {
    Wide,
    Narrow,
}

impl Width {
    /// The width of the terminal; an output that is no terminal gets everything.
    fn of_terminal() -> Width {
        match rustix::termios::tcgetwinsize(std::io::stdout()) {
            Ok(size) if (1..WIDE_COLUMNS).contains(&size.ws_col) => Width::Narrow,
            _ => Width::Wide,
        }
    }

    fn heading(self) -> String {
        if self == Width::Narrow {
            return format!(
                "{:<14} {:>8} {:>9} {:>8} {:>9} {:>7}",
                "export", "reads/s", "bytes/s", "writes/s", "bytes/s", "ms"
            );
        }
        let columns = format!("{:>9} {:>10} {:>8}", "op/s", "bytes/s", "ms");
        let above =
            format!("{:<16} {:<16} {:<29} {:<29} {:>7} {:>8} {:>6}", "", "", "read", "write", "in", "limit", "map");
        let last = format!("{:>7} {:>8} {:>6}", "flight", "waits/s", "hit %");
        format!("{above}\n{:<16} {:<16} {columns} {columns} {last}", "export", "node")
    }

    /// The work of an export within `seconds`.
    fn row(self, id: &str, node: &str, did: Look, seconds: f64) -> String {
        if self == Width::Narrow {
            let [read, write] = did.counts.map(|counts| counts.rates(seconds));
            let both = Counts {
                operations: did.counts.iter().map(|counts| counts.operations).sum(),
                time_ns: did.counts.iter().map(|counts| counts.time_ns).sum(),
                bytes: 0,
            };
            return format!(
                "{id:<14.14} {:>8} {:>9} {:>8} {:>9} {:>7.2}",
                read.0,
                read.1,
                write.0,
                write.1,
                both.latency_ms()
            );
        }
        let [read, write] = did.counts.map(|counts| counts.cells(seconds));
        // Time spent in requests over time passed. It counts requests that have ended, and a disk may hang.
        let average = did.counts.iter().map(|counts| counts.time_ns as f64).sum::<f64>() / seconds / 1e9;
        let in_flight = average.max(did.in_flight as f64);
        let nodes = did.nodes.cells(seconds);
        format!("{id:<16.16} {node:<16.16} {read} {write} {in_flight:>7.1} {nodes}")
    }
}

/// The exports and the counts of each.
fn look(monitor: &mut Monitor) -> Result<Vec<(String, String, Look)>, Failure> {
    let stats = monitor.execute("query-blockstats")?;
    let exports = stats.as_array().into_iter().flatten().map(|export| {
        let text = |key: &str| export[key].as_str().unwrap_or("-").to_owned();
        let counts = ["rd", "wr"].map(|kind| Counts::of(&export["stats"], kind));
        (
            text("device"),
            text("node-name"),
            Look { counts, nodes: Nodes::of(export), in_flight: export["x-in-flight"].as_u64().unwrap_or(0) },
        )
    });
    Ok(exports.collect())
}

fn run(matches: &ArgMatches, console: &mut Console) -> Result<u8, Failure> {
    let args = TopArgs::from_arg_matches(matches)?;
    let [socket] = args.socket.as_slice() else { return Err(Failure::usage("Expecting the socket of a monitor")) };
    if !(0.01..=86_400.0).contains(&args.interval) {
        return Err(Failure::new(format!("--interval expects seconds from 0.01 to 86400, not {}", args.interval)));
    }
    let mut monitor = Monitor::connect(socket)?;
    let redraw = std::io::stdout().is_terminal();
    let by_id = |exports: &[(String, String, Look)]| -> BTreeMap<String, Look> {
        exports.iter().map(|(id, _, look)| (id.clone(), *look)).collect()
    };
    // Figures are differences of two looks.
    let (mut before, mut last) = (by_id(&look(&mut monitor)?), Instant::now());
    let keys = redraw.then(Keys::new);
    let wait = |seconds: f64| {
        let time = Duration::from_secs_f64(seconds);
        match &keys {
            Some(keys) => keys.wait_for_q(time),
            None => {
                std::thread::sleep(time);
                false
            }
        }
    };
    let mut looks = 0;
    if wait(args.interval.min(FIRST_SECONDS)) {
        return Ok(0);
    }
    loop {
        let exports = look(&mut monitor)?;
        let seconds = last.elapsed().as_secs_f64().max(1e-3);
        last = Instant::now();
        let width = if redraw { Width::of_terminal() } else { Width::Wide };
        if redraw {
            console.print("\x1b[H\x1b[2J");
        }
        console.line(width.heading());
        for (id, node, look) in &exports {
            let old = before.get(id).copied().unwrap_or(*look);
            let did = Look {
                counts: [0, 1].map(|at| look.counts[at].since(old.counts[at])),
                nodes: look.nodes.since(old.nodes),
                in_flight: look.in_flight,
            };
            console.line(width.row(id, node, did, seconds));
        }
        // Others' daemons have no such command.
        if let Ok(budget) = monitor.execute("x-query-metadata-budget") {
            console.line(budget_line(&budget));
        }
        if keys.is_some() {
            console.line("q: end");
        }
        console.flush();
        before = by_id(&exports);
        looks += 1;
        if args.count.is_some_and(|count| looks >= count) || wait(args.interval) {
            return Ok(0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_narrow_table_fits_sixty_columns() {
        let most = Counts { operations: 9_999_999, bytes: 1023 << 30, time_ns: 9_999_999_000_000 };
        let did = Look { counts: [most, most], nodes: Nodes { waits: 9, hits: 99, misses: 1 }, in_flight: 64 };
        let row = Width::Narrow.row("an-export-with-a-long-name", "node", did, 1.0);
        for line in [Width::Narrow.heading(), row.clone()] {
            assert!(line.chars().count() <= NARROW_COLUMNS, "{line}");
        }
        assert!(row.starts_with("an-export-with"), "{row}");
        for line in Width::Wide.heading().lines().chain([Width::Wide.row("e", "n", did, 1.0).as_str()]) {
            assert!(line.chars().count() < usize::from(WIDE_COLUMNS), "{line}");
        }
    }

    #[test]
    fn requests_that_hang_are_in_flight() {
        let did = Look { in_flight: 5, ..Look::default() };
        let row = Width::Wide.row("e", "n", did, 1.0);
        assert!(row.contains(" 5.0 "), "{row}");
    }

    #[test]
    fn figures_are_by_the_second() {
        let did = Counts { operations: 50, bytes: 1 << 20, time_ns: 100_000_000 };
        assert_eq!(did.rates(0.5), ("100".to_owned(), human(2 << 20)));
        assert!((did.latency_ms() - 2.0).abs() < 1e-9);
    }
}
