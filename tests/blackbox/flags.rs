//! `folio serve`'s flags: access, values from a file, and the meaning of vLLM's flags here.

use serde_json::{Value, json};

use crate::http::{health_at, request, request_with};
use crate::server::Server;
use crate::{folio, output, refusal, scratch, stdout};

const KEY: &str = "a-key-of-enough-letters";

#[test]
fn what_is_exposed_or_not_true_here_is_refused_by_name() {
    let check = |flags: &[&str], parts: &[&str]| {
        let text = refusal(&[&["serve", "--port", "0"], flags].concat());
        assert!(text.starts_with("error: ") && !text.contains("panicked"), "{flags:?}: {text}");
        for part in parts {
            assert!(text.contains(part), "{flags:?} should mention {part:?}: {text}");
        }
    };
    check(&["--host", "0.0.0.0"], &["--host", "--api-key-file", "--insecure-no-auth"]);
    check(&["--metrics-listen", "0.0.0.0:0"], &["--metrics-listen", "loopback"]);
    check(&["--kv-events-endpoint", "tcp://*:0"], &["--kv-events-endpoint", "token ids"]);
    check(&["--api-key", KEY], &["--api-key", "--api-key-file", "FOLIO_API_KEY"]);
    check(&["-tp", "2"], &["--tensor-parallel-size", "only 1"]);
    check(&["--max-n", "0"], &["--max-n"]);
    check(&["--tls-cert", "/no/such/cert", "--tls-key", "/no/such/key"], &["/no/such/cert"]);
    check(&["--otlp-traces-endpoint", "ftp://x"], &["--otlp-traces-endpoint"]);
    check(&["org/never-fetched"], &["folio pull org/never-fetched"]);
    let output = output(&["serve", "--port", "0", "--allowed-origins", "nonsense"]);
    assert_eq!(output.status.code(), Some(1), "what cannot be served ends with 1");
}

#[test]
fn keys_a_configuration_and_flags_of_vllm() {
    let folder = scratch("flags");
    let config = folder.join("folio.toml");
    std::fs::write(&config, "max-num-seqs = 4\nport = 1\nserved-model-name = [\"first\", \"second\"]\nmax_n = 2\n")
        .expect("writable");
    let mut command = folio(&["serve", "--port", "0", "--dtype", "auto", "-tp", "1", "--max_model_len", "512"]);
    command.env("FOLIO_CONFIG", &config).env("VLLM_API_KEY", KEY).args(["--metrics-listen", "127.0.0.1:0"]);
    let server = Server::start_as(command);
    let greeting = server.greeting.join("\n");
    for part in ["note: --tensor-parallel-size", "context 512, 4 requests at once", "1, from VLLM_API_KEY"] {
        assert!(greeting.contains(part), "{part} is missing:\n{greeting}");
    }
    assert_eq!(request(server.port, "GET", "/health", "").status, 200);
    let url = format!("http://127.0.0.1:{}", server.port);
    assert!(stdout(&["health", "--url", &url]).contains("ok"));
    assert!(refusal(&["health", "--url", "http://127.0.0.1:1"]).contains("could not reach"));
    for path in ["/v1/models", "/metrics", "/nowhere"] {
        assert_eq!(request(server.port, "GET", path, "").status, 401, "{path}");
    }
    let ask = |body: Value| {
        let body = body.to_string();
        let key = format!("authorization: Bearer {KEY}\r\n");
        let answer = request_with(server.port, "POST", "/v1/completions", &key, &body);
        (answer.status, serde_json::from_str::<Value>(&answer.body).expect("JSON"))
    };
    let (status, answer) = ask(json!({"model": "second", "prompt": "fn main", "max_tokens": 2}));
    assert_eq!((status, &answer["model"]), (200, &json!("first")), "{answer}");
    let (status, answer) = ask(json!({"prompt": "fn main", "max_tokens": 2, "n": 3}));
    assert_eq!(status, 400, "max_n of the file counts: {answer}");
    // The metrics have an address of their own, and no other route is there.
    let metrics = greeting.lines().find_map(|line| line.trim().strip_prefix("metrics  http://127.0.0.1:"));
    let port = metrics.and_then(|rest| rest.split('/').next()?.parse().ok()).expect("an address");
    let text = request(port, "GET", "/metrics", "");
    assert!(text.status == 200 && text.body.contains("vllm:num_requests_running"), "{}", text.body);
    assert_eq!(request(port, "GET", "/v1/models", "").status, 404);
}

#[test]
fn a_configuration_that_is_wrong_names_file_and_key() {
    let config = scratch("flags").join("wrong.toml");
    let path = config.to_str().expect("UTF-8");
    for (text, parts) in
        [("prot = 1", ["prot", "port"]), ("port = \"x\"", ["port", "x"]), ("max-n = 0", ["max-n", "0"])]
    {
        std::fs::write(&config, text).expect("writable");
        let said = refusal(&["serve", "--config", path]);
        for part in parts.iter().chain(&["wrong.toml"]) {
            assert!(said.contains(part), "{text}: {part} in {said}");
        }
    }
    assert!(refusal(&["serve", "--config", "/no/such/file"]).contains("/no/such/file"));
}

#[cfg(unix)]
#[test]
fn a_unix_socket_serves_its_owner_alone() {
    use std::io::{BufRead, BufReader};
    use std::os::unix::fs::PermissionsExt;
    let path = scratch("uds").join("s");
    let mut child = folio(&["serve", "--max-num-seqs", "2", "--uds", path.to_str().expect("UTF-8")])
        .stderr(std::process::Stdio::piped())
        .spawn()
        .expect("the binary starts");
    let mut lines = BufReader::new(child.stderr.take().expect("stderr")).lines().map_while(Result::ok);
    assert!(lines.any(|line| line.contains("ready at unix:")), "it becomes ready");
    let rest = std::thread::spawn(move || lines.count());
    assert_eq!(std::fs::metadata(&path).expect("a socket").permissions().mode() & 0o777, 0o600);
    assert_eq!(health_at(&path).expect("it answers"), 200);
    assert!(std::process::Command::new("kill").arg(child.id().to_string()).status().expect("kill runs").success());
    assert!(child.wait().expect("it ends").success());
    rest.join().expect("all was read");
    assert!(!path.exists(), "the socket is removed");
}
