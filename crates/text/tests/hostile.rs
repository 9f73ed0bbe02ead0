//! Damaged and hostile files: an error or a working tokenizer, never a panic, never a hang.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use folio_testing::Rng;
use folio_text::{ChatRender, ChatTemplate, Detokenizer, Error, GgufVocab, SpecialTokens, Tokenizer};
use serde_json::{Value, json};

const FIXTURE: &str = include_str!("data/tokenizer.json");
const TEXT: &str = "the café 日本 <tool>x🎉<eos> 123\n";

/// Loads and, where that works, uses the tokenizer. `Err` holds the message of a load error.
fn exercise(file: &[u8]) -> Result<(), String> {
    let tokenizer = Arc::new(Tokenizer::from_json(file).map_err(|error| error.to_string())?);
    for text in ["", TEXT, "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!"] {
        for special in [false, true] {
            if let Ok(ids) = tokenizer.encode(text, special) {
                let mut detokenizer = Detokenizer::new(Arc::clone(&tokenizer), special);
                let mut shown: String = ids.iter().map(|id| detokenizer.push(*id)).collect();
                shown.push_str(&detokenizer.finish());
                let _ = tokenizer.decode(&ids, special);
            }
        }
    }
    let _ = tokenizer.decode(&[0, 1, u32::MAX, 255, 300, 1 << 24], false);
    let _ = (tokenizer.token_bytes(u32::MAX), tokenizer.token_id("<bos>"), tokenizer.is_special(7));
    Ok(())
}

/// Every place in a JSON value, as a pointer. Long lists and maps are sampled.
fn places(value: &Value, at: String, out: &mut Vec<String>) {
    match value {
        Value::Object(map) => {
            for (key, value) in map.iter().take(12) {
                places(value, format!("{at}/{}", key.replace('~', "~0").replace('/', "~1")), out);
            }
        }
        Value::Array(list) => {
            for (index, value) in list.iter().enumerate().take(4) {
                places(value, format!("{at}/{index}"), out);
            }
        }
        _ => {}
    }
    out.push(at);
}

#[test]
fn a_damaged_tokenizer_is_an_error_that_names_the_field() {
    let whole: Value = serde_json::from_str(FIXTURE).unwrap();
    exercise(FIXTURE.as_bytes()).unwrap();
    let mut paths = Vec::new();
    places(&whole, String::new(), &mut paths);
    let wrong = [
        json!(null),
        json!(-1),
        json!(4_294_967_295_u64),
        json!(1e300),
        json!("x"),
        json!([]),
        json!({}),
        json!([[1]]),
        json!({"type": "Sequence"}),
        json!(true),
    ];
    let (mut tried, mut refused, mut unnamed) = (0, 0, Vec::new());
    for path in &paths {
        for replacement in &wrong {
            let mut damaged = whole.clone();
            *damaged.pointer_mut(path).unwrap() = replacement.clone();
            let result = catch_unwind(AssertUnwindSafe(|| exercise(damaged.to_string().as_bytes())));
            let result = result.unwrap_or_else(|_| panic!("panic for {replacement} at {path}"));
            tried += 1;
            if let Err(message) = result {
                refused += 1;
                let field = path.split('/').nth(1).unwrap_or("tokenizer.json");
                if !message.contains(field) {
                    unnamed.push(format!("{path} = {replacement}: {message}"));
                }
            }
        }
    }
    println!("{tried} mutations, {refused} refused, {} without the field's name", unnamed.len());
    assert!(tried >= 300 && refused * 3 > tried, "{tried} {refused}");
    assert!(unnamed.is_empty(), "{}", unnamed.join("\n"));
}

#[test]
fn cut_and_flipped_bytes_do_not_panic() {
    let bytes = FIXTURE.as_bytes();
    for step in 0..60 {
        let cut = bytes.len() * step / 60;
        assert!(exercise(&bytes[..cut]).is_err(), "cut at {cut}");
    }
    let mut rng = Rng::new(1);
    for _ in 0..150 {
        let mut damaged = bytes.to_vec();
        for _ in 0..3 {
            let at = rng.below(damaged.len());
            damaged[at] ^= 1 << rng.below(8);
        }
        let result = catch_unwind(AssertUnwindSafe(|| exercise(&damaged)));
        assert!(result.is_ok(), "a panic came out");
    }
}

#[test]
fn a_regex_bomb_is_an_error_not_a_hang() {
    for bomb in ["(a+)+$", "(a|aa)+$", "(a|a)*$"] {
        let split = json!({"type": "Split", "pattern": {"Regex": bomb}, "behavior": "Isolated", "invert": false});
        let replace = json!({"type": "Replace", "pattern": {"Regex": bomb}, "content": "x"});
        for (field, part) in [("pre_tokenizer", split), ("normalizer", replace)] {
            let mut file: Value = serde_json::from_str(FIXTURE).unwrap();
            file[field] = part;
            let tokenizer = Tokenizer::from_json(file.to_string().as_bytes()).unwrap();
            let result = tokenizer.encode(&("a".repeat(64) + "!"), false);
            assert!(matches!(result, Err(Error::Encode(_))), "{bomb} in {field}");
            assert!(tokenizer.encode("b c", false).is_ok(), "it still works afterwards");
        }
    }
}

#[test]
fn dropout_and_huge_ids_are_refused() {
    let check = |pointer: &str, value: Value, expect: &str| {
        let mut file: Value = serde_json::from_str(FIXTURE).unwrap();
        *file.pointer_mut(pointer).unwrap() = value;
        let error = Tokenizer::from_json(file.to_string().as_bytes()).err().unwrap().to_string();
        assert!(error.contains(expect), "{error}");
    };
    check("/model/dropout", json!(0.1), "model.dropout");
    check("/model/vocab/a", json!(16_000_000), "id 16000000 is far beyond");
    check("/added_tokens/0/id", json!(4_000_000_000_u64), "added_tokens[0].id");
    check("/model/vocab/a", json!(4_000_000_000_u64), "model.vocab");
}

/// As many tokens as the text could be compared with one by one, all of one first letter: the work
/// must not grow with their number squared.
#[test]
fn many_literal_tokens_are_found_by_look_up() {
    let mut tokens: Vec<String> = (0..300_000).map(|number| format!("<{number}>")).collect();
    tokens.extend(["x".into(), "<1".into()]);
    let token_types = vec![4; tokens.len()];
    let vocab = GgufVocab { model: "llama".into(), tokens, token_types, unk: Some(0), ..Default::default() };
    let tokenizer = Tokenizer::from_gguf(vocab).unwrap();
    let text = "x<299999><1<12>".repeat(2000);
    let ids = tokenizer.encode(&text, false).unwrap();
    assert_eq!(ids, [300_000, 299_999, 300_001, 12].repeat(2000));
}

fn render(source: &str) -> Result<String, Error> {
    let messages = vec![json!({"role": "user", "content": "hi"})];
    ChatTemplate::new(source, SpecialTokens::default())?.render(&ChatRender { messages, ..Default::default() })
}

#[test]
fn templates_run_under_limits() {
    let check = |source: &str, expect: &str| {
        let error = render(source).unwrap_err().to_string();
        assert!(error.contains(expect), "{source}: {error}");
    };
    let inner = "{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}";
    check(&format!("{{% for a in range(9999) %}}{inner}{{% endfor %}}"), "instructions");
    check("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion");
    check("{% set x = 'y' * 100000 %}{% for a in range(1000) %}{{ x }}{% endfor %}", "bytes");
    check("{{ raise_exception('roles must alternate') }}", "refused the conversation: roles must alternate");
    check("{% include 'other' %}", "chat template");
    check("{{ messages", "does not compile");
    check(&("{{ ".to_string() + &"(".repeat(20_000) + "1" + &")".repeat(20_000) + " }}"), "does not compile");
    check("{{ messages[0].content[::0] }}", "failed");
}

#[test]
fn deep_values_are_not_shown_to_the_bottom() {
    let nested = "{% set ns = namespace(x=[]) %}{% for a in range(200) %}{% set ns.x = [ns.x] %}{% endfor %}";
    let text = render(&format!("{nested}{{{{ ns.x }}}}")).unwrap();
    assert!(text.starts_with("[[[") && text.contains("...") && text.len() < 300, "{text}");
    let error = render(&format!("{nested}{{{{ ns.x|tojson }}}}")).unwrap_err().to_string();
    assert!(error.contains("too deeply"), "{error}");
}

/// Ways out of a Python sandbox: nothing they ask for exists here.
#[test]
fn escapes_from_the_sandbox_find_nothing() {
    for source in [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ self._TemplateReference__context.cycler.__init__.__globals__.os }}",
        "{{ messages.__class__.__init__ }}",
        "{% import 'os' as os %}{{ os.system('id') }}",
        "{{ debug() }}",
        "{{ config }}",
        "{{ request.application.__globals__ }}",
        "{{ lipsum.__globals__['os'] }}",
        "{{ namespace.__init__ }}",
    ] {
        if let Ok(text) = render(source) {
            assert_eq!(text, "", "{source}");
        }
    }
}

#[test]
fn messages_and_variables_are_checked() {
    let template = ChatTemplate::new("{{ messages|length }}", SpecialTokens::default()).unwrap();
    let request = ChatRender { messages: vec![json!("hi")], ..Default::default() };
    assert!(template.render(&request).unwrap_err().to_string().contains("message 0 is not an object"));
    let extra = [("messages".to_string(), json!([]))].into_iter().collect();
    let request = ChatRender { extra, ..Default::default() };
    assert!(template.render(&request).unwrap_err().to_string().contains("reserved"));
}
