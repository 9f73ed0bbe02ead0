//! Properties of every flag of every command, and a snapshot of their help.

use std::collections::{HashMap, HashSet};

use clap::{Args, Command, CommandFactory};

use super::*;

#[test]
fn flags_do_not_contradict_each_other() {
    Folio::command().debug_assert();
}

/// All commands by their whole names.
fn commands() -> Vec<(String, Command)> {
    walk("folio", &Folio::command())
}

/// A command and all its subcommands but `help`, by their whole names.
fn walk(name: &str, command: &Command) -> Vec<(String, Command)> {
    let subcommands = command.get_subcommands().filter(|sub| sub.get_name() != "help");
    let below = subcommands.flat_map(|sub| walk(&format!("{name} {}", sub.get_name()), sub));
    std::iter::once((name.to_string(), command.clone())).chain(below).collect()
}

/// Ids and headings of the flags of each struct that has a heading.
fn headed() -> Vec<HashMap<String, String>> {
    fn of<T: Args>() -> HashMap<String, String> {
        let command = T::augment_args(Command::new("alone"));
        let heading = |arg: &clap::Arg| arg.get_help_heading().expect("a struct with a heading").to_string();
        command.get_arguments().map(|arg| (arg.get_id().to_string(), heading(arg))).collect()
    }
    vec![
        of::<DeviceArgs>(),
        of::<MemoryArgs>(),
        of::<QueueArgs>(),
        of::<SpeculateArgs>(),
        of::<SamplingArgs>(),
        of::<ListenArgs>(),
        of::<AccessArgs>(),
        of::<NamingArgs>(),
        of::<LogArgs>(),
        of::<LimitArgs>(),
        of::<TimeoutArgs>(),
        of::<KvEventsArgs>(),
        of::<AgainstArgs>(),
        of::<MatrixArgs>(),
        of::<TargetArgs>(),
        of::<DatasetArgs>(),
        of::<TrafficArgs>(),
        of::<ResultArgs>(),
    ]
}

#[test]
fn every_flag_is_under_its_own_heading() {
    let headed = headed();
    let mut wrong = Vec::new();
    for (name, command) in commands() {
        let has = |id: &String| command.get_arguments().any(|arg| arg.get_id() == id.as_str());
        let flattened: HashMap<_, _> = headed.iter().filter(|args| args.keys().all(has)).flatten().collect();
        for arg in command.get_arguments() {
            // A command's own flags, and those of structs without a heading, are under "Options".
            let expect = flattened.get(&arg.get_id().to_string()).map(|heading| heading.as_str());
            if arg.get_help_heading() != expect {
                wrong.push(format!("{name} --{}: under {:?} and not {expect:?}", arg.get_id(), arg.get_help_heading()));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn flags_that_list_their_values_list_all() {
    let listed = |arg: &clap::Arg| {
        let names = arg.get_value_names().unwrap_or_default().iter().flat_map(|name| name.split('|'));
        names.map(str::to_string).collect::<Vec<_>>()
    };
    let mut checked = 0;
    for (name, command) in commands() {
        for arg in command.get_arguments().filter(|arg| arg.get_id() == "quantize") {
            assert_eq!(listed(arg), folio_model::AtLoad::ALL.map(|(name, _)| name), "{name} --quantize");
            checked += 1;
        }
    }
    assert!(checked > 5, "commands that run a model take it: {checked}");
}

/// Entries of a help text: a heading, or a flag with its description. Empty lines are dropped.
fn entries(help: &str) -> Vec<String> {
    let mut entries = Vec::<String>::new();
    for line in help.lines().filter(|line| !line.trim().is_empty()) {
        let indent = line.len() - line.trim_start().len();
        match entries.last_mut() {
            // Descriptions are indented by ten columns, flags by six at most.
            Some(entry) if indent > 6 => entry.push_str(&format!("\n{}", line.trim_end())),
            _ => entries.push(line.trim_end().to_string()),
        }
    }
    entries
}

/// The long help of every command. A flag that an earlier command has with the same description is
/// only named.
fn help() -> String {
    /// Values of the environment do not belong to the snapshot.
    fn without_values(command: Command) -> Command {
        command.mut_args(|arg| arg.hide_env_values(true)).mut_subcommands(without_values)
    }
    fn name_repeated(text: &mut String, repeated: &mut Vec<String>) {
        if !repeated.is_empty() {
            text.push_str(&format!("  as above: {}\n", repeated.join(", ")));
            repeated.clear();
        }
    }
    let mut folio = without_values(Folio::command());
    folio.build();
    let mut text = String::new();
    let mut printed = HashSet::new();
    for (name, mut command) in walk("folio", &folio) {
        text.push_str(&format!("==== {name}\n"));
        let mut repeated = Vec::new();
        for entry in entries(&command.render_long_help().to_string()) {
            let is_heading = !entry.starts_with(' ');
            if is_heading {
                name_repeated(&mut text, &mut repeated);
            }
            if is_heading || printed.insert(entry.clone()) {
                text.push_str(&format!("{entry}\n"));
            } else {
                let flag = entry.trim_start().lines().next().unwrap_or_default();
                repeated.push(flag.split(" <").next().unwrap_or(flag).to_string());
            }
        }
        name_repeated(&mut text, &mut repeated);
        text.push('\n');
    }
    text
}

/// `FOLIO_WRITE_HELP=1 cargo test -p folio help_is` renews the file.
#[test]
fn help_is_the_committed_text() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/src/args/help.txt");
    let help = help();
    if std::env::var_os("FOLIO_WRITE_HELP").is_some() {
        std::fs::write(path, &help).expect("the file is writable");
    }
    let committed = std::fs::read_to_string(path).expect("the file is committed");
    for (number, (expect, line)) in (1..).zip(committed.lines().zip(help.lines())) {
        assert_eq!(expect, line, "help.txt:{number}; if that is meant: FOLIO_WRITE_HELP=1 cargo test -p folio help_is");
    }
    assert_eq!(committed.lines().count(), help.lines().count(), "help.txt is of another length");
}
