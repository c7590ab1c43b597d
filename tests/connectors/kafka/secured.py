"""Real brokers configured as in production: TLS with its own CA, SCRAM, client certificates and ACLs; OAuth tokens."""

import base64
import http.server
import json
import shutil
import subprocess
import threading
import time
import urllib.parse
from pathlib import Path
from typing import Any

import pytest
from kafka.admin import (
    ACL,
    ACLFilter,
    ACLOperation,
    ACLPermissionType,
    ACLResourcePatternType,
    ResourcePattern,
    ResourcePatternFilter,
    ResourceType,
)

from streamlearn.settings import KafkaSettings
from tests.broker import PASSWORD, USER, Broker

_CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")


class Authority:
    """A certificate authority (CA) in a folder."""

    def __init__(self, folder: Path) -> None:
        if shutil.which("openssl") is None:
            pytest.skip("openssl is not installed")
        folder.mkdir()
        self._folder = folder
        self.certificate = folder / "authority.pem"
        self._key = folder / "authority.key"
        _openssl("-keyout", self._key, "-out", self.certificate, "-subj", "/CN=authority")

    def issue(self, name: str, *extensions: str) -> tuple[Path, Path]:
        certificate, key = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        signed = ("-CA", self.certificate, "-CAkey", self._key)
        added = [part for extension in extensions for part in ("-addext", extension)]
        _openssl("-keyout", key, "-out", certificate, "-subj", f"/CN={name}", *signed, *added)
        return certificate, key

    def encrypt(self, key: Path) -> Path:
        encrypted = key.with_suffix(".encrypted")
        command = ["openssl", "pkcs8", "-topk8", "-in", str(key), "-out", str(encrypted), "-passout", "pass:secret"]
        subprocess.run(command, check=True, capture_output=True)
        return encrypted


class SecuredBroker(Broker):
    """A broker that requires SCRAM on `SASL_SSL` and a certificate of its CA on `SSL`; ACLs decide about operations.

    Its certificate is valid for 127.0.0.1 only. A client on PLAINTEXT may do everything.
    """

    listeners = ("PLAINTEXT", "CONTROLLER", "SASL_SSL", "SSL")

    def __init__(self, home: Path, folder: Path) -> None:
        self.authority = Authority(folder / "authority")
        certificate, key = self.authority.issue("broker", "subjectAltName=IP:127.0.0.1")
        self._identity = folder / "broker.pem"
        self._identity.write_text(key.read_text() + certificate.read_text())
        super().__init__(home, folder)

    def by_password(self, *topics: str, **overrides: Any) -> KafkaSettings:
        values = {
            "bootstrap_servers": self._addresses["SASL_SSL"],
            "security_protocol": "SASL_SSL",
            "ssl_cafile": self.authority.certificate,
            "sasl_mechanism": "SCRAM-SHA-512",
            "sasl_plain_username": USER,
            "sasl_plain_password": PASSWORD,
            **overrides,
        }
        return self.settings(*topics, **values)

    def by_certificate(self, *topics: str, **overrides: Any) -> KafkaSettings:
        values = {
            "bootstrap_servers": self._addresses["SSL"],
            "security_protocol": "SSL",
            "ssl_cafile": self.authority.certificate,
            **overrides,
        }
        return self.settings(*topics, **values)

    def allow(self, user: str, name: str, *operations: str, kind: str = "TOPIC") -> None:
        pattern = ResourcePattern(ResourceType[kind], name)
        with self._admin() as admin:
            admin.create_acls(
                [
                    ACL(f"User:{user}", "*", ACLOperation[operation], ACLPermissionType.ALLOW, pattern)
                    for operation in operations
                ]
            )

    def revoke(self, user: str, topic: str) -> None:
        rule = ACLFilter(
            f"User:{user}",
            "*",
            ACLOperation.ANY,
            ACLPermissionType.ANY,
            ResourcePatternFilter(ResourceType.TOPIC, topic, ACLResourcePatternType.LITERAL),
        )
        with self._admin() as admin:
            admin.delete_acls([rule])

    def _properties(self) -> dict[str, str]:
        store = {"type": "PEM", "location": str(self._identity)}
        trust = {"type": "PEM", "location": str(self.authority.certificate)}
        scram = "org.apache.kafka.common.security.scram.ScramLoginModule required;"
        mechanisms = ("SCRAM-SHA-256", "SCRAM-SHA-512")
        return {
            **super()._properties(),
            **{f"ssl.keystore.{key}": value for key, value in store.items()},
            **{f"ssl.truststore.{key}": value for key, value in trust.items()},
            "listener.name.ssl.ssl.client.auth": "required",
            "sasl.enabled.mechanisms": ",".join(mechanisms),
            **{f"listener.name.sasl_ssl.{name.lower()}.sasl.jaas.config": scram for name in mechanisms},
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": "User:ANONYMOUS",
        }

    def _users(self) -> list[str]:
        named = f"[name={USER},password={PASSWORD}]"
        return ["--add-scram", f"SCRAM-SHA-256={named}", "--add-scram", f"SCRAM-SHA-512={named}"]


class OAuthBroker(Broker):
    """A broker that requires a token on `SASL_PLAINTEXT`; it accepts unsigned ones and ends sessions with them."""

    def by_token(self, *topics: str, **overrides: Any) -> KafkaSettings:
        values = {
            "bootstrap_servers": self._addresses["SASL_PLAINTEXT"],
            "security_protocol": "SASL_PLAINTEXT",
            "sasl_mechanism": "OAUTHBEARER",
            **overrides,
        }
        return self.settings(*topics, **values)

    def _properties(self) -> dict[str, str]:
        properties = super()._properties()
        del properties["listener.name.sasl_plaintext.plain.sasl.jaas.config"]
        module = "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule"
        return {
            **properties,
            "sasl.enabled.mechanisms": "OAUTHBEARER",
            "listener.name.sasl_plaintext.oauthbearer.sasl.jaas.config": (
                f'{module} required unsecuredLoginStringClaim_sub="broker";'
            ),
            "listener.name.sasl_plaintext.oauthbearer.connections.max.reauth.ms": "3600000",
        }


CLIENT, SECRET = "streamlearn", "s3cret/with:signs"


class TokenEndpoint(http.server.ThreadingHTTPServer):
    """An OAuth token endpoint on this machine that gives unsigned tokens of `lifetime_s` to one client."""

    daemon_threads = True

    def __init__(self, lifetime_s: float) -> None:
        super().__init__(("127.0.0.1", 0), _TokenRequest)
        self.lifetime_s = lifetime_s
        self.url = f"http://127.0.0.1:{self.server_port}/token"
        self.requests: list[dict[str, list[str]]] = []
        """The form of each request that was granted."""
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def grant(self, form: dict[str, list[str]]) -> dict[str, object]:
        self.requests.append(form)
        return {"access_token": unsigned_token(self.lifetime_s), "token_type": "Bearer", "expires_in": self.lifetime_s}


class _TokenRequest(http.server.BaseHTTPRequestHandler):
    server: TokenEndpoint

    def do_POST(self) -> None:
        form = urllib.parse.parse_qs(self.rfile.read(int(self.headers["content-length"])).decode())
        expected = "Basic " + base64.b64encode(f"{CLIENT}:{SECRET}".encode()).decode()
        granted = self.headers["authorization"] == expected and form["grant_type"] == ["client_credentials"]
        body = (
            self.server.grant(form) if granted else {"error": "invalid_client", "error_description": "no such secret"}
        )
        self.send_response(200 if granted else 401)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_: object) -> None:
        """Nothing is printed."""


def unsigned_token(lifetime_s: float) -> str:
    """A JSON Web Token without a signature, which Kafka's `OAuthBearerUnsecuredValidatorCallbackHandler` accepts."""
    now = time.time()
    parts = ({"alg": "none"}, {"sub": USER, "iat": now, "exp": now + lifetime_s})
    encoded = [base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=").decode() for part in parts]
    return ".".join([*encoded, ""])


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", "req", "-x509", *_CURVE, *arguments], check=True, capture_output=True)
