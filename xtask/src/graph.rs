//! Permitted dependencies: the layers of ARCHITECTURE.md, checked against the manifests.

mod modules;

use std::path::PathBuf;

use anyhow::{Result, bail};

use crate::process;

/// Each crate with the crates of this workspace that it depends on. The binary wires them all.
const ALLOWED: &[(&str, &[&str])] = &[
    ("folio-formats", &[]),
    ("folio-scheduler", &[]),
    // For tests and chores only. Weights in memory are a feature of it.
    ("folio-testing", &["folio-formats"]),
    ("folio-simulator", &["folio-scheduler"]),
    ("folio-text", &[]),
    ("folio-device", &["folio-formats"]),
    ("folio-model", &["folio-device", "folio-formats"]),
    ("folio-quantize", &["folio-model", "folio-device", "folio-formats"]),
    ("folio-engine", &["folio-scheduler", "folio-model", "folio-device", "folio-formats"]),
    ("folio-server", &["folio-text", "folio-engine"]),
    ("folio-hub", &["folio-session"]),
    ("folio-terminal", &[]),
    // All of them under its feature `models`, without which xtask links it.
    (
        "folio-measure",
        &["folio-session", "folio-quantize", "folio-text", "folio-engine", "folio-model", "folio-device"],
    ),
    (
        "folio-session",
        &["folio-engine", "folio-text", "folio-model", "folio-device", "folio-formats", "folio-scheduler"],
    ),
    (
        "folio",
        &[
            "folio-formats",
            "folio-hub",
            "folio-measure",
            "folio-text",
            "folio-device",
            "folio-model",
            "folio-quantize",
            "folio-engine",
            "folio-server",
            "folio-session",
            "folio-terminal",
        ],
    ),
    ("xtask", &["folio-formats", "folio-measure", "folio-testing"]),
];

/// Crates whose modules depend one way only.
const ONE_WAY: &[&str] = &["session"];

/// A crate of this workspace, and the others that its manifest names.
struct Crate {
    name: String,
    dependencies: Vec<String>,
    test_dependencies: Vec<String>,
}

/// Compares the manifests with the table in both directions, and looks for cycles of modules.
pub fn check() -> Result<()> {
    let mut wrong = differences(&crates()?);
    for name in ONE_WAY {
        if let Some(cycle) = modules::cycle(&modules::edges(&folder(name))?) {
            wrong.push(format!("modules of folio-{name} depend on each other: {}", cycle.join(" -> ")));
        }
    }
    if !wrong.is_empty() {
        bail!("crate graph:\n  {}", wrong.join("\n  "));
    }
    Ok(())
}

fn folder(name: &str) -> PathBuf {
    process::root().join("crates").join(name).join("src")
}

fn differences(crates: &[Crate]) -> Vec<String> {
    let mut wrong = Vec::new();
    for Crate { name, dependencies, .. } in crates {
        let Some((_, allowed)) = ALLOWED.iter().find(|(known, _)| known == name) else {
            wrong.push(format!("{name} is not in the crate graph of xtask/src/graph.rs"));
            continue;
        };
        // Tests may use any lower layer.
        let refused = dependencies.iter().filter(|target| !allowed.contains(&target.as_str()));
        wrong.extend(refused.map(|target| format!("{name} may not depend on {target}")));
        let unused = allowed.iter().filter(|target| !dependencies.iter().any(|found| found == *target));
        wrong.extend(unused.map(|target| format!("{name} does not depend on {target}: remove the edge")));
    }
    wrong
}

/// Prints the edges that the manifests have, crate by crate.
pub fn print() -> Result<()> {
    for Crate { name, dependencies, test_dependencies } in crates()? {
        println!("{name}");
        dependencies.iter().for_each(|target| println!("  -> {target}"));
        test_dependencies.iter().for_each(|target| println!("  -> {target} (tests)"));
    }
    for name in ONE_WAY {
        println!("\nmodules of folio-{name}");
        for (module, targets) in modules::edges(&folder(name))? {
            println!("{module}");
            targets.iter().for_each(|target| println!("  -> {target}"));
        }
    }
    Ok(())
}

/// In the order of `ALLOWED`; those that it does not name come last.
fn crates() -> Result<Vec<Crate>> {
    let metadata = process::output(&mut process::cargo(&["metadata", "--no-deps", "--format-version", "1"]))?;
    let metadata: serde_json::Value = serde_json::from_str(&metadata)?;
    let place = |name: &str| ALLOWED.iter().position(|(known, _)| *known == name);
    let mut crates: Vec<Crate> = metadata["packages"].as_array().into_iter().flatten().map(read).collect();
    crates.sort_by_key(|found| place(&found.name).unwrap_or(ALLOWED.len()));
    for Crate { dependencies, test_dependencies, .. } in &mut crates {
        dependencies.retain(|target| place(target).is_some());
        test_dependencies.retain(|target| place(target).is_some());
    }
    Ok(crates)
}

fn read(package: &serde_json::Value) -> Crate {
    let targets = |of_tests: bool| {
        let all = package["dependencies"].as_array().into_iter().flatten();
        let of_kind = all.filter(|dependency| (dependency["kind"].as_str() == Some("dev")) == of_tests);
        of_kind.filter_map(|dependency| dependency["name"].as_str().map(String::from)).collect()
    };
    let name = package["name"].as_str().unwrap_or_default().to_owned();
    Crate { name, dependencies: targets(false), test_dependencies: targets(true) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn manifests_and_table_have_the_same_edges() {
        let strings = |names: &[&str]| names.iter().map(ToString::to_string).collect();
        let of = |name: &str, dependencies: &[&str]| Crate {
            name: name.into(),
            dependencies: strings(dependencies),
            test_dependencies: Vec::new(),
        };
        assert_eq!(differences(&[of("folio-server", &["folio-engine", "folio-text"])]), [""; 0]);
        let found = differences(&[of("folio-text", &["folio-device"])]);
        assert_eq!(found, ["folio-text may not depend on folio-device"]);
        let found = differences(&[of("folio-server", &["folio-text"]), of("folio-new", &[])]);
        assert_eq!(found[0], "folio-server does not depend on folio-engine: remove the edge");
        assert_eq!(found[1], "folio-new is not in the crate graph of xtask/src/graph.rs");
    }
}
