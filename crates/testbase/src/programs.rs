// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Other programs that tests run: each must be there, and mostly it must succeed.

use std::ffi::OsStr;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

/// The C library's way to start a program in a folder. The standard library takes it where the program has it, and a static program has what
/// some line names. Without it a test forks for each program, and the kernel copies the page tables of all that the test keeps in memory.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
#[used]
static START_IN_FOLDER: std::sync::atomic::AtomicPtr<()> =
    std::sync::atomic::AtomicPtr::new(libc::posix_spawn_file_actions_addchdir_np as *mut ());

/// The exit and the output of a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Said {
    /// Exit code; `None` after a signal.
    pub code: Option<i32>,
    /// Standard output.
    pub out: String,
    /// Standard error.
    pub err: String,
}

/// The words of QEMU where it could not measure its own speed for a new key.
const UNMEASURED: &str = "Unable to get accurate CPU usage";
/// The number of times that a command runs again for that.
const MEASUREMENTS: usize = 200;

/// Runs a command to its end, without input. The tools of administration are found, which not every user's path has.
/// A command runs again where QEMU could not measure its own speed: on a busy machine this happens now and then.
#[track_caller]
fn output_of(command: &mut Command) -> Output {
    if !command.get_envs().any(|(key, _)| key == "PATH") {
        let path = std::env::var("PATH").unwrap_or_default();
        command.env("PATH", format!("{path}:/usr/sbin:/sbin"));
    }
    command.stdin(Stdio::null());
    for _ in 0..MEASUREMENTS {
        let output = command
            .output()
            .unwrap_or_else(|error| panic!("{command:?} must be installed (scripts/setup test): {error}"));
        if output.status.success() || !String::from_utf8_lossy(&output.stderr).contains(UNMEASURED) {
            return output;
        }
        // The other load of the machine may end meanwhile.
        std::thread::sleep(Duration::from_millis(50));
    }
    panic!("{command:?}: the machine is too busy");
}

/// Runs a command to its end, without input.
#[track_caller]
pub fn finish(command: &mut Command) -> Said {
    let output = output_of(command);
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Said { code: output.status.code(), out: text(&output.stdout), err: text(&output.stderr) }
}

/// Runs a command that must succeed; its standard output.
#[track_caller]
pub fn finish_well(command: &mut Command) -> String {
    let said = finish(command);
    assert_eq!(said.code, Some(0), "{command:?}: {}{}", said.out, said.err);
    said.out
}

/// Runs a program that must succeed; its standard output.
#[track_caller]
pub fn tool<P: AsRef<OsStr>>(program: P, arguments: &[&str]) -> String {
    finish_well(Command::new(program).args(arguments))
}

/// Runs a program that must fail; its standard error.
#[track_caller]
pub fn failing_tool(program: &str, arguments: &[&str]) -> String {
    let said = finish(Command::new(program).args(arguments));
    assert_ne!(said.code, Some(0), "{program} {arguments:?} succeeded: {}{}", said.out, said.err);
    said.err
}

/// Runs a program that must end with one of these codes; all its output.
#[track_caller]
pub fn run_to_code(program: &str, arguments: &[&str], codes: &[i32]) -> String {
    let said = finish(Command::new(program).args(arguments));
    let text = said.out + &said.err;
    assert!(said.code.is_some_and(|code| codes.contains(&code)), "{program} {arguments:?}: {:?} {text}", said.code);
    text
}

/// Runs a program in a folder: whether it succeeded, and all its output.
#[track_caller]
pub fn output(program: &str, folder: &Path, arguments: &[&str]) -> (bool, String) {
    let said = finish(Command::new(program).current_dir(folder).args(arguments));
    (said.code == Some(0), said.out + &said.err)
}

/// Runs a program in a folder, which must succeed; all its output.
#[track_caller]
pub fn run(program: &str, folder: &Path, arguments: &[&str]) -> String {
    let (good, text) = output(program, folder, arguments);
    assert!(good, "{program} {arguments:?}: {text}");
    text
}
