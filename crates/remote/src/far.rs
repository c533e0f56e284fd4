//! The far end of a chain: scripts and programs that run there.
//!
//! Job: run a POSIX script at the far end and tell its own words from what login shells print; say which hop does not lead on. Refuses to contact
//! anything but the named hops, and to set time-outs of its own (those of `ssh` and of the user's configuration hold).
//! Invariants: an answer is complete, marked at both ends, or an error; nothing here outlives the call that started it, except a
//! [`FarProcess`], whose connection ends when it is dropped.

use crate::chain::Chain;
use crate::error::RemoteError;
use crate::quote::quote;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdout, Command, Stdio};

/// What the far end prints before its own words, so that greetings of login shells are told apart.
const BEGIN: &str = "drafthorse:begin";
/// What it prints after them, with the exit code.
const END: &str = "drafthorse:end";
/// Code of a far end whose folder is not there.
const NO_FOLDER: i32 = 97;

/// The far end.
#[derive(Clone, Debug)]
pub struct Far {
    chain: Chain,
    env: BTreeMap<String, String>,
}

/// What a script answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// Its exit code.
    pub code: i32,
    /// Its standard output.
    pub out: String,
    /// Standard error of the whole chain.
    pub err: String,
}

impl Answer {
    /// What it said: its `error:` line, else the last line of standard error, else of the output.
    pub fn said(&self) -> String {
        let error = self.err.lines().rev().find_map(|l| l.strip_prefix("error: ")).map(str::to_owned);
        error.or_else(|| last_line(&self.err)).or_else(|| last_line(&self.out)).unwrap_or_else(|| "nothing was said".into())
    }
}

fn last_line(text: &str) -> Option<String> {
    text.lines().rev().map(str::trim).find(|l| !l.is_empty()).map(str::to_owned)
}

/// What a script gets on standard input.
pub enum Input<'a> {
    /// Nothing.
    Nothing,
    /// These bytes.
    Text(&'a str),
    /// What the reader gives; the function is told how many bytes have gone.
    Stream(Box<dyn Read + Send + 'a>, &'a (dyn Fn(u64) + Sync)),
}

impl Far {
    /// The end of `chain`, where programs get `env` besides what is set there.
    pub fn new(chain: Chain, env: BTreeMap<String, String>) -> Far {
        Far { chain, env }
    }

    /// The chain.
    pub fn chain(&self) -> &Chain {
        &self.chain
    }

    /// The chain in words, for messages.
    pub fn place(&self) -> String {
        self.chain.to_string()
    }

    fn prelude(&self) -> String {
        let exports: String = self.env.iter().map(|(k, v)| format!("export {k}={}\n", quote(v))).collect();
        format!("printf '%s\\n' {BEGIN}\n{exports}")
    }

    /// Runs `text` with `sh` and positional `args`. `doing` says what it is for, in an error's words.
    ///
    /// # Errors
    /// When the chain does not lead there or breaks; a script that fails is no error here.
    pub fn script(&self, doing: &str, text: &str, args: &[&str], input: Input<'_>) -> Result<Answer, RemoteError> {
        let whole = format!("{}(\n{text}\n)\nprintf '\\n{END} %d\\n' \"$?\"\n", self.prelude());
        let argv: Vec<String> = ["sh", "-c", &whole, "sh"].into_iter().chain(args.iter().copied()).map(str::to_owned).collect();
        let mut command = self.chain.command(argv);
        command.stdin(if matches!(input, Input::Nothing) { Stdio::null() } else { Stdio::piped() });
        let (out, err) = exchange(&mut command, input).map_err(|e| self.no_program(e))?;
        let Some(begin) = out.find(BEGIN) else { return Err(self.unreachable(&err)) };
        let body = &out[begin + BEGIN.len()..];
        let body = body.strip_prefix('\n').unwrap_or(body);
        let ended = body.rfind(&format!("\n{END} "));
        let code = ended.and_then(|at| body[at + 1 + END.len()..].trim().parse().ok());
        match (ended, code) {
            (Some(at), Some(code)) => Ok(Answer { code, out: body[..at].to_owned(), err }),
            _ => Err(RemoteError::Lost { place: self.place(), doing: doing.to_owned() }),
        }
    }

    /// As [`Far::script`], and a code other than 0 is an error with `todo`.
    ///
    /// # Errors
    /// As said.
    pub fn must(&self, doing: &str, text: &str, args: &[&str], todo: &str) -> Result<String, RemoteError> {
        let answer = self.script(doing, text, args, Input::Nothing)?;
        match answer.code {
            0 => Ok(answer.out),
            code => Err(RemoteError::Failed {
                place: self.place(),
                doing: doing.to_owned(),
                code,
                said: answer.said(),
                todo: todo.to_owned(),
            }),
        }
    }

    /// Starts a program in `folder` there; its standard output is read from the returned process, standard error comes through as it is
    /// unless `quiet`.
    ///
    /// # Errors
    /// When the chain does not lead there.
    pub fn start(&self, folder: &str, argv: &[String], quiet: bool) -> Result<FarProcess, RemoteError> {
        let whole = format!("{}cd \"$1\" || exit {NO_FOLDER}\nshift\nexec \"$@\"\n", self.prelude());
        let inner = ["sh", "-c", &whole, "sh", folder].into_iter().map(str::to_owned).chain(argv.iter().cloned()).collect();
        let mut child = self
            .chain
            .command(inner)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(if quiet { Stdio::null() } else { Stdio::inherit() })
            .spawn()
            .map_err(|e| self.no_program(e))?;
        let mut out = BufReader::new(child.stdout.take().expect("it was asked for"));
        let mut line = Vec::new();
        loop {
            line.clear();
            let read = out.read_until(b'\n', &mut line).unwrap_or(0);
            if line.trim_ascii_end().ends_with(BEGIN.as_bytes()) {
                return Ok(FarProcess { child, out });
            }
            if read == 0 {
                let _ = child.wait();
                return Err(self.unreachable(""));
            }
        }
    }

    /// Runs a program in `folder` there and copies its standard output to `to`. Gives its exit code.
    ///
    /// # Errors
    /// When the chain does not lead there, or `to` cannot be written.
    pub fn pass_through(&self, folder: &str, argv: &[String], to: &mut dyn Write) -> Result<i32, RemoteError> {
        let mut process = self.start(folder, argv, false)?;
        std::io::copy(&mut process.out, to).map_err(RemoteError::io("write", "standard output"))?;
        let status = process.child.wait().map_err(RemoteError::io("wait for", self.place()))?;
        match status.code() {
            Some(NO_FOLDER) => Err(RemoteError::Unknown {
                what: format!("folder {folder} on {}", self.place()),
                todo: "deploy there first: drafthorse deploy CONFIG --to NAME".into(),
            }),
            // 255 is what ssh gives when the connection breaks; no program of ours uses it.
            None | Some(255) => Err(RemoteError::Lost { place: self.place(), doing: "a command ran there".into() }),
            Some(code) => Ok(code),
        }
    }

    fn no_program(&self, source: std::io::Error) -> RemoteError {
        let program = self.chain.hops().first().map_or_else(|| "sh".to_owned(), |h| h.words()[0].clone());
        RemoteError::NoProgram { program, source }
    }

    /// Which hop does not lead on: the first whose own end does not answer.
    fn unreachable(&self, err: &str) -> RemoteError {
        let hops = self.chain.hops();
        let of = hops.len();
        for number in 1..=of {
            let argv = ["sh", "-c", &format!("printf '%s\\n' {BEGIN}")].map(str::to_owned).to_vec();
            let mut command = self.chain.first(number).command(argv);
            let answered = exchange(command.stdin(Stdio::null()), Input::Nothing);
            let said = match answered {
                Ok((out, _)) if out.contains(BEGIN) => continue,
                Ok((_, err)) => last_line(&err).unwrap_or_else(|| "it said nothing".into()),
                Err(error) => error.to_string(),
            };
            let todo = if number == 1 {
                "try the hop by hand, followed by `true`; check the name, the key and that the machine is on".to_owned()
            } else {
                format!("hop {} answers; check that what this hop names exists there and runs", number - 1)
            };
            return RemoteError::Unreachable { number, of, hop: hops[number - 1].to_string(), said, todo };
        }
        RemoteError::Unreachable {
            number: of,
            of,
            hop: hops.last().map_or_else(|| "sh".into(), ToString::to_string),
            said: last_line(err).unwrap_or_else(|| "every hop answers now, but the command got no answer".into()),
            todo: "run the command again; if this lasts, look at the log of the last hop".into(),
        }
    }
}

/// Runs to the end; gives standard output and standard error. Input that is not wanted any more is no error.
fn exchange(command: &mut Command, input: Input<'_>) -> std::io::Result<(String, String)> {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let stdin = child.stdin.take();
    let mut err_pipe = child.stderr.take().expect("it was asked for");
    let mut out_pipe = child.stdout.take().expect("it was asked for");
    let (out, err) = std::thread::scope(|scope| {
        let err = scope.spawn(move || {
            let mut text = Vec::new();
            let _ = err_pipe.read_to_end(&mut text);
            text
        });
        scope.spawn(move || {
            let Some(mut stdin) = stdin else { return };
            match input {
                Input::Nothing => {}
                Input::Text(text) => drop(stdin.write_all(text.as_bytes())),
                Input::Stream(mut from, progress) => {
                    let mut buffer = vec![0; 1 << 18];
                    let mut gone = 0;
                    while let Ok(n) = from.read(&mut buffer) {
                        if n == 0 || stdin.write_all(&buffer[..n]).is_err() {
                            break;
                        }
                        gone += n as u64;
                        progress(gone);
                    }
                }
            }
        });
        let mut text = Vec::new();
        let _ = out_pipe.read_to_end(&mut text);
        (text, err.join().unwrap_or_default())
    });
    child.wait()?;
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    Ok((text(out), text(err)))
}

/// A program that runs at the far end. Its connection ends when this is dropped; a detached run does not.
#[derive(Debug)]
pub struct FarProcess {
    child: Child,
    out: BufReader<ChildStdout>,
}

impl FarProcess {
    /// Its standard output.
    pub fn out(&mut self) -> &mut BufReader<ChildStdout> {
        &mut self.out
    }

    /// Ends the connection and gives the exit code, if the program ended by itself.
    pub fn end(mut self) -> Option<i32> {
        self.child.wait().ok().and_then(|s| s.code())
    }

    /// Id of the local process that holds the connection.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for FarProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
