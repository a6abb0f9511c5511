// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Where command lines come from: a terminal, with editing and a history that outlives the shell, or standard input.

use cowshed_storage::rt;
use rustyline::error::ReadlineError;
use rustyline::{Config, DefaultEditor};
use std::io::{self, BufRead, IsTerminal, Write};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

/// Lines that the history keeps.
const HISTORY_LINES: usize = 1000;

/// A source of lines.
pub struct Lines {
    source: Arc<Mutex<Source>>,
}

enum Source {
    Terminal { editor: Box<DefaultEditor>, prompt: String, history: Option<PathBuf> },
    Plain { prompt: String },
}

impl Lines {
    /// The process's own terminal, or its standard input.
    pub fn new(program: &str) -> Lines {
        let prompt = format!("{program}> ");
        let is_terminal = io::stdin().is_terminal() && io::stdout().is_terminal();
        let source = match is_terminal.then(editor).flatten() {
            Some(mut editor) => {
                let history = history_file();
                if let Some(path) = &history {
                    // There is none at first.
                    let _ = editor.load_history(path);
                }
                Source::Terminal { editor: Box::new(editor), prompt, history }
            }
            None => Source::Plain { prompt },
        };
        Lines { source: Arc::new(Mutex::new(source)) }
    }

    /// The next line; `None` at the end. Requests in the background go on meanwhile.
    pub async fn next(&mut self) -> io::Result<Option<String>> {
        let source = Arc::clone(&self.source);
        rt::run_on_cpu_pool(move || source.lock().unwrap_or_else(PoisonError::into_inner).next()).await
    }
}

impl Source {
    fn next(&mut self) -> io::Result<Option<String>> {
        match self {
            Source::Terminal { editor, prompt, history } => loop {
                match editor.readline(prompt) {
                    Ok(line) => {
                        let is_new = editor.add_history_entry(&line).unwrap_or(false);
                        if let Some(path) = history.as_ref().filter(|_| is_new) {
                            // A history that can't be kept is no reason to stop.
                            let _ = editor.append_history(path);
                        }
                        return Ok(Some(line));
                    }
                    // Ctrl-C drops the line, as in other shells.
                    Err(ReadlineError::Interrupted) => {}
                    Err(ReadlineError::Eof) => return Ok(None),
                    Err(ReadlineError::Io(error)) => return Err(error),
                    Err(other) => return Err(io::Error::other(other)),
                }
            },
            Source::Plain { prompt } => {
                let mut out = io::stdout().lock();
                out.write_all(prompt.as_bytes())?;
                out.flush()?;
                let mut line = String::new();
                match io::stdin().lock().read_line(&mut line)? {
                    0 => Ok(None),
                    _ => Ok(Some(line)),
                }
            }
        }
    }
}

fn editor() -> Option<DefaultEditor> {
    let config = Config::builder().max_history_size(HISTORY_LINES).ok()?.build();
    DefaultEditor::with_config(config).ok()
}

/// `cowshed/io-history` in the folder for the state of programs, made if need be.
fn history_file() -> Option<PathBuf> {
    let absolute = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let state = absolute("XDG_STATE_HOME").or_else(|| Some(absolute("HOME")?.join(".local/state")))?;
    let folder = state.join("cowshed");
    std::fs::create_dir_all(&folder).ok()?;
    Some(folder.join("io-history"))
}
