//! A chain of hops: how a command reaches the machine and container where the program runs.
//!
//! Job: wrap a command in every hop, quoting once for every shell on the way. Refuses to know what a hop does: whatever runs its last arguments as
//! a command will do (`ssh`, `pct exec 200 --`, `docker exec -i NAME`, `kubectl exec -i POD --`, `lxc-attach -n NAME --`, `sh -c`).
//! Invariant: the command at the end gets exactly the arguments that were given, whatever is in them.

use crate::quote::join;
use serde::Deserialize;
use std::fmt;
use std::process::Command;

/// One hop.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hop {
    words: Vec<String>,
    /// Whether the hop joins its last arguments and lets a shell read them.
    shell: bool,
}

impl Hop {
    /// A hop from its words. One that runs `ssh`, or that ends in `-c` (`sh -c`, `su trainer -c`), hands one line to a shell; the others hand
    /// their arguments on as they are.
    ///
    /// # Errors
    /// What is wrong with the words.
    pub fn new(words: Vec<String>) -> Result<Hop, String> {
        let Some(program) = words.first().filter(|p| !p.is_empty()) else { return Err("a hop needs a program".into()) };
        if words.iter().any(|w| w.contains('\0')) {
            return Err("a hop cannot hold NUL".into());
        }
        let name = program.rsplit('/').next().unwrap_or(program);
        let of_shell = ["sh", "bash", "dash", "ash", "ksh", "zsh", "fish", "su"].contains(&name);
        let shell =
            name == "ssh" || words.last().is_some_and(|w| w == "-c" || of_shell && w.starts_with('-') && w.ends_with('c'));
        Ok(Hop { words, shell })
    }

    /// A hop from a line, split as a shell would.
    ///
    /// # Errors
    /// When the line has an open quote or no words.
    pub fn parse(line: &str) -> Result<Hop, String> {
        Hop::new(shlex::split(line).ok_or_else(|| format!("`{line}` has an open quote"))?)
    }

    /// The words.
    pub fn words(&self) -> &[String] {
        &self.words
    }

    fn wrap(&self, inner: Vec<String>) -> Vec<String> {
        let mut argv = self.words.clone();
        if self.shell {
            // The far shell must see words, never an option of the hop's own program.
            argv.push(join(inner.iter().map(String::as_str)));
        } else {
            argv.extend(inner);
        }
        argv
    }
}

impl fmt::Display for Hop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&join(self.words.iter().map(String::as_str)))
    }
}

impl<'de> Deserialize<'de> for Hop {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Hop, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Written {
            Line(String),
            Words(Vec<String>),
        }
        match Written::deserialize(deserializer)? {
            Written::Line(line) => Hop::parse(&line),
            Written::Words(words) => Hop::new(words),
        }
        .map_err(serde::de::Error::custom)
    }
}

/// All hops, outermost first; without any, commands run here.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
pub struct Chain(Vec<Hop>);

impl Chain {
    /// A chain of these hops.
    pub fn new(hops: Vec<Hop>) -> Chain {
        Chain(hops)
    }

    /// The hops.
    pub fn hops(&self) -> &[Hop] {
        &self.0
    }

    /// The chain's first `n` hops.
    #[must_use]
    pub fn first(&self, n: usize) -> Chain {
        Chain(self.0[..n.min(self.0.len())].to_vec())
    }

    /// What to run here so that `inner` runs at the far end.
    pub fn argv(&self, inner: Vec<String>) -> Vec<String> {
        self.0.iter().rev().fold(inner, |argv, hop| hop.wrap(argv))
    }

    /// The process to start here so that `inner` runs at the far end.
    pub fn command(&self, inner: Vec<String>) -> Command {
        let argv = self.argv(inner);
        let mut command = Command::new(&argv[0]);
        command.args(&argv[1..]);
        command
    }
}

impl fmt::Display for Chain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("this machine");
        }
        for (i, hop) in self.0.iter().enumerate() {
            let arrow = if i == 0 { "" } else { " > " };
            write!(f, "{arrow}{hop}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chain(hops: &[&str]) -> Chain {
        Chain(hops.iter().map(|h| Hop::parse(h).unwrap()).collect())
    }

    fn words(list: &[&str]) -> Vec<String> {
        list.iter().map(|w| (*w).to_owned()).collect()
    }

    #[test]
    fn hops_hand_on_words_or_a_line() {
        let argv = chain(&["ssh root@host", "pct exec 200 --"]).argv(words(&["sh", "-c", "echo $1", "sh", "a b"]));
        assert_eq!(argv, words(&["ssh", "root@host", "pct exec 200 -- sh -c 'echo $1' sh 'a b'"]));
        let argv = chain(&["docker exec -i 'my container'"]).argv(words(&["true"]));
        assert_eq!(argv, words(&["docker", "exec", "-i", "my container", "true"]));
        assert_eq!(chain(&["bash -lc"]).argv(words(&["echo", "a b"])), words(&["bash", "-lc", "echo 'a b'"]));
        let argv = chain(&["/usr/bin/ssh -p 2222 h", "su trainer -c"]).argv(words(&["echo", "a"]));
        assert_eq!(argv, words(&["/usr/bin/ssh", "-p", "2222", "h", "su trainer -c 'echo a'"]));
    }

    #[test]
    fn broken_hops_are_refused() {
        for (line, word) in [("ssh 'x", "open quote"), ("", "needs a program"), ("   ", "needs a program")] {
            let told = Hop::parse(line).unwrap_err();
            assert!(told.contains(word), "{told}");
        }
        assert_eq!(chain(&[]).to_string(), "this machine");
        assert_eq!(chain(&["ssh h", "docker exec -i 'a b'"]).to_string(), "ssh h > docker exec -i 'a b'");
    }
}
