//! What holds for every flag of every command.

use std::collections::HashMap;

use clap::{Args, Command, CommandFactory};

use super::*;

#[test]
fn flags_do_not_contradict_each_other() {
    Folio::command().debug_assert();
}

/// Every command that takes flags, by its whole name.
fn commands() -> Vec<(String, Command)> {
    fn walk(name: &str, command: &Command, found: &mut Vec<(String, Command)>) {
        found.push((name.to_string(), command.clone()));
        command.get_subcommands().for_each(|sub| walk(&format!("{name} {}", sub.get_name()), sub, found));
    }
    let mut found = Vec::new();
    walk("folio", &Folio::command(), &mut found);
    found
}

/// The flags that structs with a heading have, by themselves: ids and headings.
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
            // A command's own flags, and those of structs without a heading, are under clap's own: Options.
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
